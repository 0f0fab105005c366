"""Timing and checkpoints of a training loop: written to a directory, or omitted for a run in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from jaxalign.parallel import hosts
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.tracking.timing import Timing


class DirectoryRecording:
    """Writes a run's timing and checkpoints to its directory. Use it as a context manager; its exit waits for checkpoints.

    Args:
      directory: the parent of checkpoints/.
      timing: the directory of timing.jsonl.
      peak: peak FLOP/s of all devices together; 0 if unknown.
    """

    saves = True

    def __init__(self, directory: Path, timing: Path, peak: float):
        self.timing = Timing(timing / "timing.jsonl", peak)
        self._checkpointer = Checkpointer(directory / "checkpoints")

    def restore(self, init: Callable[[], Any], abstract: Any) -> tuple[int, Any]:
        """(number of completed steps, state) from the newest checkpoint, or from `init()` if there is none."""
        began = time.perf_counter()
        start = self._checkpointer.latest() or 0
        state = self._checkpointer.restore(abstract) if start else init()
        self.timing.add("start", time.perf_counter() - began)
        return start, state

    def wait(self) -> None:
        """Returns when every process has reached this call; the metrics may then be read."""
        hosts.once(_nothing)

    def save(self, step: int, state: Any) -> None:
        """Saves a checkpoint in the background. Raises OSError if the disk is full."""
        self._checkpointer.save(step, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()


class MemoryRecording:
    """A run without a directory: it always starts from the beginning and writes nothing."""

    saves = False

    def __init__(self):
        self.timing = _NoTiming()

    def restore(self, init: Callable[[], Any], abstract: Any) -> tuple[int, Any]:
        """(0, init())."""
        del abstract
        return 0, init()

    def wait(self) -> None:
        """Does nothing."""

    def save(self, step: int, state: Any) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


class _NoTiming:
    """Has the methods of `Timing` and records nothing."""

    def add(self, name: str, seconds: float, tokens: int = 0, flops: float = 0.0, since: float | None = None) -> None:
        """Does nothing."""


def _nothing() -> None:
    """The action of a barrier."""
