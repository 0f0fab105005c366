"""Asynchronous RLHF, sample by sample: generators keep their slots full while the trainer updates, with bounded staleness.

The admission rule is that of AReaL (arXiv 2505.24298). Mini-batches between two versions of the weights, and bounds below one
update, follow verl's fully asynchronous trainer.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.planner.generation_time import DecodeStep, DecodingRows
from jaxalign.planner.schedules import Schedule, TaskTimes


def capacity(concurrency: int, running: int, eta: float, version: int, batch: int, accepted: int) -> int:
    """The number of rollouts that may start now: min(C - running, (eta + version + 1) B - (accepted + running)).

    The first term keeps the generators within their concurrency. The second one keeps the samples begun since the start of the
    run within those that the updates up to number `version + eta` consume: update v consumes samples [vB, (v + 1)B). A negative
    result means that none may start.

    Args:
      concurrency: C, rollouts that may run at once.
      running: rollouts that have started and not ended.
      eta: the bound on staleness, in updates; 0 is synchronous. It may be a fraction.
      version: updates done: the version of the current weights.
      batch: B, samples of one update.
      accepted: rollouts that have ended since the start of the run, whether or not they have been trained on.
    """
    return min(concurrency - running, math.floor((eta + version + 1) * batch + 1e-9) - (accepted + running))


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The generation of samples.

    Attributes:
      lengths: tokens of the responses, in the order in which they start; the sequence repeats.
      step: the time of a decode step of one group.
      slots: rows that one group decodes at once.
      batch: samples of one update.
      groups: the number of generator groups, each with its own copy of the weights.
      concurrency: rollouts that may run at once over all groups; None fills every slot.
      mini_batches: parts of a batch that the trainer consumes as they arrive, before it publishes new weights.
      recompute: seconds that an interrupted group takes to compute the KV cache of its running rows again.
    """

    lengths: Sequence[int] | np.ndarray
    step: DecodeStep
    slots: int
    batch: int
    groups: int = 1
    concurrency: int | None = None
    mini_batches: int = 1
    recompute: float = 0.0


def asynchronous(times: TaskTimes, updates: int, rollouts: Rollouts, eta: float, interruptible: bool = True) -> Schedule:
    """Generation groups and a training group that work at the same time; staleness is at most ceil(eta).

    The trainer takes the oldest finished samples. It waits for older ones that still run only if training on the others would
    make those too stale. Scoring runs on the training side. When an update ends, the trainer sends the weights for
    `times.transfer` seconds. An interruptible group stops at once, loads them, recomputes its caches and goes on with the same
    rows. Any other group ends its rows first and starts none meanwhile.

    Args:
      times: seconds on the training group; `generate` is not used, since `rollouts` determines it.
      updates: the number of updates.
      rollouts: the generation.
      eta: the bound on staleness, in updates; staleness counts from the version that began a response.
      interruptible: whether new weights interrupt running rows.

    Raises:
      UserError: a count is below 1, eta is negative, or mini_batches does not divide the batch.
    """
    _check(updates, rollouts, eta)
    run = _Run(times, rollouts, eta, interruptible)
    while len(run.update_ends) < updates:
        run.step()
    seconds = run.update_ends[-1]
    idle = {f"generation {n}": 1 - group.busy / seconds for n, group in enumerate(run.generators)}
    idle["training"] = 1 - run.trained_seconds / seconds
    trained = updates * rollouts.batch
    staleness = {stale: count / trained for stale, count in sorted(run.staleness.items())}
    return Schedule(seconds, tuple(run.update_ends), {name: max(0.0, share) for name, share in idle.items()}, staleness)


def _check(updates: int, rollouts: Rollouts, eta: float) -> None:
    counts = {"updates": updates, "batch": rollouts.batch, "groups": rollouts.groups, "mini_batches": rollouts.mini_batches,
              "the number of lengths": len(rollouts.lengths)}
    if rollouts.concurrency is not None:
        counts["concurrency"] = rollouts.concurrency
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} is {value}; give at least 1")
    if eta < 0:
        raise UserError(f"eta is {eta}; give 0 for synchronous updates, or a positive bound on staleness")
    if rollouts.batch % rollouts.mini_batches:
        raise UserError(f"a batch of {rollouts.batch} samples does not divide into {rollouts.mini_batches} mini-batches; "
                        "choose a number that divides it")


class _Generator:
    """One group of devices that decodes."""

    def __init__(self, rollouts: Rollouts):
        self.rows = DecodingRows(rollouts.slots, rollouts.step)
        self.version = 0
        self.busy = 0.0
        self.paused_until = 0.0
        self._clock = 0.0

    def next_event(self) -> float:
        """When the pause or the next response ends."""
        return self.paused_until if self._clock < self.paused_until else self._clock + self.rows.until_next()

    def advance(self, now: float) -> list[int]:
        """Decodes until `now`, which is at most the next event. Returns the samples that end then."""
        paused = self._clock < self.paused_until
        if paused or self.rows.active:
            self.busy += now - self._clock
        if not paused:
            self.rows.advance(now - self._clock)
        self._clock = now
        return [] if paused else self.rows.take_finished()

    def load(self, now: float, seconds: float, version: int) -> None:
        """Replaces the weights, which takes this long."""
        self.version, self.paused_until = version, now + seconds


class _Run:
    """The state of an asynchronous run at one time."""

    def __init__(self, times: TaskTimes, rollouts: Rollouts, eta: float, interruptible: bool):
        self.rollouts, self.eta, self.interruptible = rollouts, eta, interruptible
        self.transfer = times.transfer
        self.part_seconds = (math.fsum(times.scoring.values()) + times.training) / rollouts.mini_batches
        self.part = rollouts.batch // rollouts.mini_batches
        self.generators = [_Generator(rollouts) for _ in range(rollouts.groups)]
        self.concurrency = rollouts.concurrency or rollouts.groups * rollouts.slots
        self.now = self.trained_seconds = 0.0
        self.version = self.begun = self.accepted = self.parts_done = 0
        self.begun_with: list[int] = []  # By sample: the version that began it.
        self.finished: list[tuple[int, int]] = []  # A heap of (version that began it, sample), untrained.
        self.untrained: collections.Counter[int] = collections.Counter()  # Samples by the version that began them.
        self.staleness: collections.Counter[int] = collections.Counter()
        self.update_ends: list[float] = []
        self.training_until: float | None = None
        # Training waits for this many more samples that a version up to `awaited_version` began.
        self.awaited, self.awaited_version = 0, -1
        self.sending_until = 0.0

    def step(self) -> None:
        """Starts whatever can start now, then moves to the next event."""
        # Groups that may change their weights load the newest ones.
        for generator in self.generators:
            if generator.version < self.version and (self.interruptible or not generator.rows.active):
                recompute = self.rollouts.recompute if generator.rows.active else 0.0
                generator.load(self.now, self.transfer + recompute, self.version)
        self._admit()
        self._start_training()
        self.now = min(self._events())
        for generator in self.generators:
            for sample in generator.advance(self.now):
                self.accepted += 1
                heapq.heappush(self.finished, (self.begun_with[sample], sample))
                self.awaited -= self.begun_with[sample] <= self.awaited_version
        if self.training_until is not None and self.training_until <= self.now:
            self._end_training()

    def _events(self) -> Iterator[float]:
        yield from (generator.next_event() for generator in self.generators)
        if self.training_until is not None:
            yield self.training_until
        elif self.sending_until > self.now:
            yield self.sending_until

    def _admit(self) -> None:
        """Starts as many rollouts as the capacity and the slots allow, each on the group with the fewest rows."""
        running = self.begun - self.accepted
        allowed = capacity(self.concurrency, running, self.eta, self.version, self.rollouts.batch, self.accepted)
        if allowed <= 0:
            return
        open_groups = [generator for generator in self.generators
                       if generator.version == self.version and generator.paused_until <= self.now]
        while allowed > 0 and open_groups:
            generator = min(open_groups, key=lambda generator: generator.rows.active)
            if generator.rows.active == self.rollouts.slots:
                break
            generator.rows.add(self.begun, int(self.rollouts.lengths[self.begun % len(self.rollouts.lengths)]))
            self.begun_with.append(self.version)
            self.untrained[self.version] += 1
            self.begun += 1
            allowed -= 1

    def _start_training(self) -> None:
        """Starts on the oldest finished samples, unless the samples left would then be too many to be trained in time."""
        busy = self.training_until is not None or self.now < self.sending_until
        if busy or self.awaited > 0 or len(self.finished) < self.part:
            return
        chosen = [heapq.heappop(self.finished) for _ in range(self.part)]
        left = self.untrained - collections.Counter(version for version, _ in chosen)
        parts_left = self.rollouts.mini_batches - self.parts_done - 1
        total = 0
        for version in sorted(left):
            total += left[version]
            updates_left = version + math.ceil(self.eta) - self.version
            excess = total - updates_left * self.rollouts.batch - parts_left * self.part
            if excess > 0:
                self.awaited, self.awaited_version = excess, version
                for sample in chosen:
                    heapq.heappush(self.finished, sample)
                return
        self.untrained = left
        self.staleness.update(self.version - version for version, _ in chosen)
        self.training_until = self.now + self.part_seconds

    def _end_training(self) -> None:
        self.trained_seconds += self.part_seconds
        self.training_until = None
        self.parts_done += 1
        if self.parts_done == self.rollouts.mini_batches:
            self.parts_done = 0
            self.version += 1
            self.sending_until = self.now + self.transfer
            self.trained_seconds += self.transfer
            self.update_ends.append(self.sending_until)
