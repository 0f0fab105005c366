"""The time to generate a batch of responses whose lengths differ, sample by sample.

A group of devices decodes up to `slots` rows at once, one token of each row in a step. A synchronous batch ends with its
longest response, so that most slots are empty during the long tail. Where other prompts refill the slots, the group stays full.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """The time of one decode step as a function of the rows in it.

    Attributes:
      least: seconds of a step of few rows, which reads every weight once: bytes of the weights over the memory bandwidth.
      per_row: seconds that each row adds once rows set the time: arithmetic, or reads of the row's KV cache.
    """

    least: float
    per_row: float

    def seconds(self, rows: int) -> float:
        """Seconds of a step with this many rows: max(least, per_row * rows)."""
        return max(self.least, self.per_row * rows)


@dataclasses.dataclass(frozen=True)
class BatchTime:
    """The generation of one batch.

    Attributes:
      seconds: seconds until the last response ends.
      ends: [B] seconds at which each response ends, in the order of the batch.
      occupied: mean share of the slots that hold a row, between 0 and 1.
    """

    seconds: float
    ends: np.ndarray
    occupied: float

    def tail(self, unfinished: float) -> float:
        """Seconds at the end of the batch in which at most the share `unfinished` of the responses still runs."""
        done = len(self.ends) - math.floor(unfinished * len(self.ends))
        return float(self.seconds - np.sort(self.ends)[done - 1]) if done else self.seconds


def lognormal_lengths(count: int, mean: float, spread: float, cap: int, seed: int = 0) -> np.ndarray:
    """Response lengths in tokens: [count] integers between 1 and `cap`.

    Args:
      count: the number of responses.
      mean: the mean of the distribution before the cap, in tokens.
      spread: the standard deviation of the logarithm of the length; 0 gives every response the mean length.
      cap: the limit on new tokens; longer responses are cut off there.
      seed: the seed of the random numbers.

    Raises:
      UserError: mean or cap is below 1, or spread is negative.
    """
    if mean < 1 or cap < 1 or spread < 0:
        raise UserError(f"mean is {mean}, cap {cap} and spread {spread}; give a mean and a cap of at least 1 token, and a "
                        "spread of at least 0")
    normal = np.random.default_rng(seed).standard_normal(count)
    lengths = np.exp(math.log(mean) - spread**2 / 2 + spread * normal)
    return np.clip(np.rint(lengths), 1, cap).astype(np.int64)


def batch_seconds(lengths: Sequence[int] | np.ndarray, slots: int, step: DecodeStep) -> BatchTime:
    """Generates one batch on one group. Responses start in order; a slot whose response ends takes the next one.

    Args:
      lengths: [B] tokens of each response.
      slots: rows that the group decodes at once.
      step: the time of a decode step.

    Raises:
      UserError: slots is below 1.
    """
    rows = DecodingRows(slots, step)
    ends, clock, held, row_seconds = np.zeros(len(lengths)), 0.0, 0, 0.0
    while held < len(lengths) or rows.active:
        while held < len(lengths) and rows.active < slots:
            rows.add(held, int(lengths[held]))
            held += 1
        elapsed = rows.until_next()
        row_seconds += elapsed * rows.active
        clock += elapsed
        rows.advance(elapsed)
        for sample in rows.take_finished():
            ends[sample] = clock
    return BatchTime(clock, ends, row_seconds / (clock * slots) if clock else 0.0)


def refill_throughput(lengths: Sequence[int] | np.ndarray, slots: int, step: DecodeStep) -> float:
    """Responses per second of a group whose slots are refilled at once: slots / (mean length * seconds of a full step)."""
    return slots / (float(np.mean(lengths)) * step.seconds(slots))


class DecodingRows:
    """The rows that a group decodes: every active row gains one token a step.

    All rows advance together, so a single position in tokens and the position at which each row ends describe them.
    """

    def __init__(self, slots: int, step: DecodeStep):
        if slots < 1:
            raise UserError(f"slots is {slots}; give at least 1 row to decode at once")
        self.slots, self.step = slots, step
        self._position = 0.0
        self._ends: list[tuple[float, int]] = []  # A heap of (position of the last token, sample).

    @property
    def active(self) -> int:
        return len(self._ends)

    def add(self, sample: int, tokens: int) -> None:
        """Starts a response of this many tokens."""
        heapq.heappush(self._ends, (self._position + tokens, sample))

    def until_next(self) -> float:
        """Seconds until the next response ends if no row is added; infinite without rows."""
        return (self._ends[0][0] - self._position) * self.step.seconds(self.active) if self._ends else math.inf

    def advance(self, seconds: float) -> None:
        """Decodes for this time. The caller stops at the next end of a response."""
        if self._ends:
            self._position = min(self._position + seconds / self.step.seconds(self.active), self._ends[0][0])

    def take_finished(self) -> list[int]:
        """Removes and returns the samples whose responses have ended."""
        finished = []
        while self._ends and self._ends[0][0] - self._position <= 1e-6:
            finished.append(heapq.heappop(self._ends)[1])
        return finished
