"""Traces of some steps of one stage, for XProf, TensorBoard's profiler and Perfetto."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxalign.errors import UserError

_SPEC = re.compile(r"(?P<stage>\w+):(?P<first>\d+)(:(?P<count>[1-9]\d*))?")


def parse(spec: str) -> tuple[str, int, int]:
    """(stage, first step, how many) of STAGE:STEP or STAGE:STEP:COUNT; one step where no count is given.

    Raises:
        UserError: it is neither.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"config.profile is {spec!r}; STAGE:STEP or STAGE:STEP:COUNT is expected, such as ppo:10:3")
    return match["stage"], int(match["first"]), int(match["count"] or 1)


class Profiler:
    """Traces the steps that `spec` names into `directory`; none where it is empty or names another stage."""

    def __init__(self, spec: str, stage: str, directory: Path):
        self._directory, self._steps = directory, range(0)
        if spec:
            named, first, count = parse(spec)
            self._steps = range(first, first + count) if named == stage else range(0)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Around one step; yields whether it is traced, and must then wait for what it computes."""
        if step not in self._steps:
            yield False
            return
        with jax.profiler.trace(self._directory), jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield True
