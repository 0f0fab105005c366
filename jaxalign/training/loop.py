"""The loop every training stage runs: resume, step, write metrics, save checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxalign.parallel import hosts
from jaxalign.tracking.metrics import to_metrics
from jaxalign.tracking.profile import Profiler
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.tracking.tracker import Tracker, Trackers
from jaxalign.training.checkpoint import Checkpointer


@dataclasses.dataclass(frozen=True)
class Loop:
    """One training run inside a stage's directory.

    total_steps: how many steps in all. checkpoint_every: steps between checkpoints. shown: the metrics that the progress
    bar shows. tokens_metric: the metric that counts a step's tokens (for tokens/s), kept out of the metric file when
    it starts with an underscore. timing: the folder whose timing.jsonl counts the time, where it is another one. timeline: what
    step_fn times its phases by; where there is none, flops(step) is how many operations a step needs. peak: operations a
    second of all devices, 0 where it is not known. began: when the stage did, by `time.perf_counter`. profile: which steps of
    which stage to trace (`tracking.profile`). trackers: receive the metrics beside the metric file (`tracking.tracker`).
    settings: the run's settings as plain values, for them.
    """

    stage: str
    directory: Path
    total_steps: int
    checkpoint_every: int
    shown: tuple[str, ...] = ("loss",)
    tokens_metric: str = "tokens"
    timing: Path | None = None
    timeline: Timeline | None = None
    flops: Callable[[int], float] | None = None
    peak: float = 0.0
    began: float | None = None
    profile: str = ""
    trackers: Mapping[str, Tracker] | Sequence[Tracker] = ()
    settings: Mapping[str, Any] | None = None

    def run(self, init: Callable[[], Any], abstract: Any, step_fn: Callable[[Any, int], tuple[Any, dict]]) -> Any:
        """Trains to `total_steps` and returns the final state.

        init() makes the first state (only when there is no checkpoint); abstract describes it for the restore;
        step_fn(state, step) -> (state, metrics) donates the state it is given. Metrics may be device arrays: they are
        fetched one step late, so that the device never waits for the host.
        """
        timing = Timing((self.timing or self.directory) / "timing.jsonl", self.peak)
        checkpointer = Checkpointer(self.directory / "checkpoints")
        try:
            began = time.perf_counter()
            start = checkpointer.latest() or 0
            state = checkpointer.restore(abstract) if start else init()
            timing.add("start", time.perf_counter() - began)
            with Trackers(self.stage, self.directory, self.trackers, self.settings, start) as trackers:
                with Progress(self.stage, self.total_steps, start) as progress:
                    state = self._steps(state, start, step_fn, trackers, progress, checkpointer, timing)
            hosts.once(lambda: None)  # From here on all may read the metrics.
            return state
        finally:
            checkpointer.close()

    def _steps(self, state, start, step_fn, trackers, progress, checkpointer, timing):
        pending: tuple[int, dict] | None = None
        timeline, name = self.timeline or Timeline(), self.stage.split()[0]  # Which of several members is not in its name.
        profiler = Profiler(self.profile, name, self.directory / "profile", self.total_steps)
        began, tokens, flops = time.perf_counter(), 0, 0.0

        def settle() -> int:
            if pending is None:
                return 0
            step, metrics = pending
            metrics = to_metrics(jax.device_get(metrics))
            count = int(metrics.get(self.tokens_metric, 0))
            trackers.log(step, {name: value for name, value in metrics.items() if not name.startswith("_")})
            progress.update(tokens=count, **{name: metrics[name] for name in self.shown if name in metrics})
            return count

        for step in range(start, self.total_steps):
            with profiler.step(step) as traced:
                state, metrics = step_fn(state, step)
                if traced:
                    jax.block_until_ready((state, metrics))
            tokens += settle()
            flops += self.flops(step) if self.flops else 0.0
            pending = (step, metrics)
            if step == start:  # It waits for compilers, and would spoil every rate.
                tokens, pending = settle(), None
                now = time.perf_counter()
                timing.add("first step", now - began, tokens, since=None if self.began is None else now - self.began)
                timeline.clear()
                began, tokens, flops = now, 0, 0.0
            if (step + 1) % self.checkpoint_every == 0 or step + 1 == self.total_steps:
                tokens += settle()
                pending = None
                trackers.flush()
                rest = "train" if self.timeline is None else "other"
                timeline.write(timing, time.perf_counter() - began, rest, tokens, flops)
                began, tokens, flops = time.perf_counter(), 0, 0.0
                checkpointer.save(step + 1, state)
                timing.add("checkpoint", time.perf_counter() - began)
                began = time.perf_counter()
        return state
