"""Traces of some steps of one stage, for XProf, TensorBoard's profiler and Perfetto."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxalign.config.selectors import traced_steps


class Profiler:
    """Traces the steps that `spec` names into `directory`; none where it is empty or names another stage. steps: how many the
    stage has."""

    def __init__(self, spec: str, stage: str, directory: Path, steps: int):
        self._directory, self._steps = directory, range(0)
        if not spec:
            return
        named, first, count = traced_steps(spec)
        if named == stage:
            self._steps = range(first, first + count)
            if first + count > steps:
                logging.getLogger("jaxalign").warning(
                    f"config.profile is {spec!r}, but the steps of {stage} are numbered 0 to {steps - 1}: those beyond are not "
                    "traced"
                )

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Around one step; yields whether it is traced, and must then wait for what it computes."""
        if step not in self._steps:
            yield False
            return
        with jax.profiler.trace(self._directory), jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield True
