"""The loop of every trainer: resumes, steps, records metrics and saves checkpoints, with a directory or in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxalign import interrupts
from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.steps.checkpoint import Checkpointer
from jaxalign.tracking.metrics import by_name, to_metrics
from jaxalign.tracking.profile import Profiler
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.timing import Timeline, Timing
from jaxalign.tracking.tracker import Tracker, Trackers

Init = Callable[[], Any]
StepFunction = Callable[[Any, int], tuple[Any, Any]]
"""`(state, number) -> (state, metrics)`; metrics are a record or a dict of scalars by name."""
MOST_SKIPPED = 10
"""The number of steps in a row with a gradient that is not finite after which training stops."""


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


class Step(NamedTuple):
    """A finished training step: its number, counted from 0, and its metrics as Python numbers."""

    number: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Loop:
    """The settings of one training loop.

    Attributes:
      stage: the name that the progress bar shows; its first word is the stage that `profile` names.
      directory: the folder of metrics.jsonl, timing.jsonl and checkpoints/, in which an interrupted run resumes; None keeps
        everything in memory.
      total_steps: the number of steps.
      checkpoint_every: steps between checkpoints.
      shown: the metrics that the progress bar shows.
      timing: the directory of timing.jsonl; None for `directory`.
      timeline: times the phases within a step; None if a step is one phase.
      flops: the FLOPs of a step, for steps without a timeline.
      peak: peak FLOP/s of all devices together; 0 if unknown.
      began: when the stage started, by `time.perf_counter`.
      profile: the steps to trace (`tracking.profile`).
      progress: whether to show progress on stderr.
      trackers: receive the same metrics as the metric file (`jaxalign.tracking.tracker`).
      settings: the settings of the run as plain values, for the trackers.
      run_id: identifies the run in its checkpoints, such as a hash of its config: checkpoints of another run are refused.
      stop: `stop(state, completed)`: whether training ends early after so many completed steps; None for never. It must give
        the same answer again when the run resumes from that state.
    """

    stage: str
    directory: Path | None
    total_steps: int = 0
    checkpoint_every: int = 1
    shown: tuple[str, ...] = ("loss",)
    timing: Path | None = None
    timeline: Timeline | None = None
    flops: Callable[[int], float] | None = None
    peak: float = 0.0
    began: float | None = None
    profile: str = ""
    progress: bool = True
    trackers: Mapping[str, Tracker] | Sequence[Tracker] = ()
    settings: Mapping[str, Any] | None = None
    run_id: str = ""
    stop: Callable[[Any, int], bool] | None = None

    def begin(self, init: Init, abstract: Any, step_fn: StepFunction) -> Training:
        """Prepares a run of the loop. Iterating over the result trains.

        Args:
          init: creates the initial state; called only if there is no checkpoint.
          abstract: ShapeDtypeStructs of the state, with shardings, for restoring a checkpoint.
          step_fn: `step_fn(state, step) -> (state, metrics)`; it donates its input state. Metrics are a record or a dict of
            scalars. They may be device arrays: they are fetched one step late, so that the device does not wait for the host.
        """
        return Training(self, init, abstract, step_fn)


class Training:
    """A training run. Iterating over it trains and yields a `Step` for each step that this process computes.

    Attributes:
      state: the newest state; None before iteration begins. The next step donates its buffers.
      completed: the number of completed steps, including those of earlier processes.
      running: whether iteration has begun and not yet ended.
    """

    def __init__(self, loop: Loop, init: Init, abstract: Any, step_fn: StepFunction):
        self._loop, self._init, self._abstract, self._step_fn = loop, init, abstract, step_fn
        self.state: Any = None
        self.completed = 0
        self._skipped = 0  # Steps in a row that skipped an update.
        self.running = False

    def __iter__(self) -> Iterator[Step]:
        loop = self._loop
        recording = Recording(loop.directory, loop.timing, loop.peak, loop.run_id)
        self.running = True
        try:
            with interrupts.at_steps(recording.saves), _closing(recording):
                start, self.state = recording.restore(self._init, self._abstract)
                self.completed = start
                with contextlib.ExitStack() as stack:
                    trackers = Trackers(loop.stage, loop.directory, loop.trackers, loop.settings, start)
                    stack.enter_context(trackers)
                    progress = None
                    if loop.progress:
                        progress = stack.enter_context(Progress(loop.stage, loop.total_steps, start))
                    yield from self._steps(start, recording, trackers, progress)
                if recording.saves:
                    hosts.once(lambda: None)  # Every process has reached this call, so the metrics may be read.
        finally:
            self.running = False

    def _steps(self, start: int, recording: Recording, trackers: Trackers, progress: Progress | None) -> Iterator[Step]:
        loop, clock = self._loop, _Clock(self._loop, recording.timing)
        settle = functools.partial(self._settle, trackers, progress, clock)
        name = re.split("[ ,]", loop.stage)[0]  # Members of an ensemble and later rounds share the stage's name.
        profiler = Profiler(loop.profile, name, (loop.directory or Path()) / "profile", loop.total_steps)
        pending: tuple[int, Any] | None = None

        if self._ends():
            return
        for step in range(start, loop.total_steps):
            with profiler.step(step) as traced:
                self.state, metrics = self._step_fn(self.state, step)
                if traced:
                    jax.block_until_ready((self.state, metrics))
            self.completed = step + 1
            if pending is not None:
                yield from clock.paused(settle(*pending))
            clock.flops += loop.flops(step) if loop.flops else 0.0
            pending = (step, metrics)
            if step == start:  # The first step waits for the compiler and would distort every rate.
                settled, pending = settle(*pending), None
                clock.first_step()
                yield from clock.paused(settled)
            last, stopped = self._ends(), interrupts.ends_after(step + 1)
            if last or (recording.saves and (stopped or (step + 1) % loop.checkpoint_every == 0)):
                settled = None if pending is None else settle(*pending)
                pending = None
                trackers.flush()
                with clock.checkpoint():
                    recording.save(step + 1, self.state)
                if settled is not None:
                    yield from clock.paused(settled)
            if last or stopped:
                break

    def _ends(self) -> bool:
        """Whether training is complete or ends early."""
        loop = self._loop
        return self.completed >= loop.total_steps or (loop.stop is not None and loop.stop(self.state, self.completed))

    def _settle(self, trackers: Trackers, progress: Progress | None, clock: _Clock, step: int, metrics: Any) -> Step:
        """Fetches, logs and shows the metrics of a step."""
        loop = self._loop
        numbers = to_metrics(by_name(jax.device_get(metrics)))
        count = int(numbers.get("tokens", 0))
        trackers.log(step, numbers)
        self._check_gradients(step, numbers)
        if progress is not None:
            progress.update(tokens=count, **{name: numbers[name] for name in loop.shown if name in numbers})
        clock.tokens += count
        return Step(step, numbers)

    def _check_gradients(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns of a skipped update, except one that the loss scale explains.

        Raises:
          UserError: each of the last `MOST_SKIPPED` steps, or every step of a shorter run, skipped an update.
        """
        if float(metrics.get("skipped", 0)) - float(metrics.get("overflowed", 0)) <= 0:
            self._skipped = 0
            return
        self._skipped += 1
        stage, most = self._loop.stage, min(MOST_SKIPPED, self._loop.total_steps)
        if self._skipped >= most:
            steps = "the only step" if most == 1 else f"{most} steps in a row, up to step {step + 1},"
            raise UserError(f"[{stage}] the gradients of {steps} are not finite, so their updates were skipped; lower "
                            "optimizer.learning_rate, or check the data for the cause")
        if self._skipped == 1 and hosts.is_first():
            logging.getLogger("jaxalign").warning(
                f"[{stage}] the gradient of step {step + 1} is not finite; its update is skipped, and training stops after "
                f"{most} such steps in a row"
            )


@contextlib.contextmanager
def _closing(recording: Recording) -> Iterator[None]:
    """Waits for the last checkpoint at the end of the body, also if the caller ends the loop, but not after an error in one of
    several processes: that checkpoint would wait for a process that has failed, and the others would not be told."""
    try:
        yield
    except BaseException as error:
        if hosts.count() == 1 or isinstance(error, GeneratorExit):
            recording.close()
        raise
    recording.close()


class _Clock:
    """Times a loop between checkpoints, excluding the time that the caller spends on a yielded step."""

    def __init__(self, loop: Loop, timing):
        self._timing, self._stage_began = timing, loop.began
        self._timeline, self._rest = loop.timeline or Timeline(), "train" if loop.timeline is None else "other"
        self._restart()

    def _restart(self) -> None:
        self._began, self.tokens, self.flops = time.perf_counter(), 0, 0.0

    def paused(self, settled: Step) -> Iterator[Step]:
        """Yields the step. The time until the caller requests the next step is not counted."""
        began = time.perf_counter()
        yield settled
        self._began += time.perf_counter() - began

    def first_step(self) -> None:
        """Records the first step, which includes compilation."""
        now = time.perf_counter()
        since = None if self._stage_began is None else now - self._stage_began
        self._timing.add("first step", now - self._began, self.tokens, since=since)
        self._timeline.clear()
        self._restart()

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Records the phases since the last checkpoint, times the body of the `with` statement as a checkpoint, and starts the
        next interval."""
        self._timeline.write(self._timing, time.perf_counter() - self._began, self._rest, self.tokens, self.flops)
        self._restart()
        yield
        self._timing.add("checkpoint", time.perf_counter() - self._began)
        self._restart()
