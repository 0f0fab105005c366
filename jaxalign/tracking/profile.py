"""Traces selected steps of one stage, for XProf, TensorBoard's profiler and Perfetto."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxalign.config.root import traced_steps


class Profiler:
    """Traces the steps of a stage that `config.profile` selects.

    Args:
      spec: STAGE:STEP or STAGE:STEP:COUNT; nothing is traced if it is empty or names another stage.
      stage: the stage's name.
      directory: the folder for the traces.
      steps: the number of steps of the stage; a warning is logged if `spec` exceeds it.
    """

    def __init__(self, spec: str, stage: str, directory: Path, steps: int):
        self._directory, self._steps = directory, range(0)
        if not spec:
            return
        named, first, count = traced_steps(spec)
        if named == stage:
            self._steps = range(first, first + count)
            if first + count > steps:
                logging.getLogger("jaxalign").warning(
                    f"config.profile is {spec!r}, but the steps of {stage} are numbered 0 to {steps - 1}: later steps are "
                    "not traced"
                )

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """A context for one step; yields whether it is traced. A traced step must wait for its results."""
        if step not in self._steps:
            yield False
            return
        with jax.profiler.trace(self._directory), jax.profiler.StepTraceAnnotation("step", step_num=step):
            yield True
