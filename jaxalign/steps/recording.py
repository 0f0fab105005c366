"""Timing and checkpoints of a training loop: written to a directory, or omitted for a run in memory."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.tracking.timing import Timing


class Recording:
    """Writes a run's timing and checkpoints to its directory. A run in memory starts from the beginning and writes nothing.

    Args:
      directory: the parent of checkpoints/; None for a run in memory.
      timing: the directory of timing.jsonl; None for `directory`.
      peak: peak FLOP/s of all devices together; 0 if unknown.
      run: identifies the run in its checkpoints.
    """

    def __init__(self, directory: Path | None, timing: Path | None, peak: float, run: str = ""):
        self.saves = directory is not None
        if self.saves:
            self.timing = Timing((timing or directory) / "timing.jsonl", peak)
            self._checkpointer = Checkpointer(directory / "checkpoints", run)
        else:
            self.timing = types.SimpleNamespace(add=lambda *_, **__: None)

    def restore(self, init: Callable[[], Any], abstract: Any) -> tuple[int, Any]:
        """(number of completed steps, state) from the newest intact checkpoint, or from `init()` if there is none."""
        if not self.saves:
            return 0, init()
        began = time.perf_counter()
        start, state = (0, init()) if self._checkpointer.latest() is None else self._checkpointer.restore(abstract)
        self.timing.add("start", time.perf_counter() - began)
        return start, state

    def save(self, step: int, state: Any) -> None:
        """Saves a checkpoint in the background. Raises OSError if the disk is full."""
        if self.saves:
            self._checkpointer.save(step, state)

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        if self.saves:
            self._checkpointer.close()
