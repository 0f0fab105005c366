"""Computes scores with a function on the host while other responses are still being sampled."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jaxalign.rewards.callables import RewardReport
from jaxalign.rollout.responses import Response

Answered = tuple[np.ndarray, np.ndarray, RewardReport]
"""(scores float32 [n], kept bool [n], report) for n responses."""


class EarlyScores:
    """Calls `ask(rows, token ids of the responses without the stop token) -> Answered` in one thread. Each call starts when the
    previous one returns, with all rows that have ended since."""

    def __init__(self, ask: Callable[[Sequence[int], Sequence[Sequence[int]]], Answered]):
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "early scores")
        self._waiting: collections.deque[tuple[int, Response]] = collections.deque()
        self._calls: list[Future[tuple[list[int], Answered] | None]] = []

    def add(self, ended: Sequence[tuple[int, Response]]) -> None:
        """Receives (number in the batch, response) for rows that have just ended, each row once. Does not block."""
        self._waiting.extend(ended)
        self._calls.append(self._thread.submit(self._call))

    def _call(self) -> tuple[list[int], Answered] | None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return None
        rows = [row for row, _ in taken]
        return rows, self._ask(rows, [response.ids[: len(response.ids) - response.ended] for _, response in taken])

    def result(self, rows: int) -> tuple[np.ndarray, np.ndarray, str | None]:
        """(scores float32 [rows], kept bool [rows], the first error or None). Waits for all calls, and raises if `ask` does."""
        scores, kept, why = np.zeros(rows, np.float32), np.zeros(rows, bool), None
        for call in self._calls:
            done = call.result()
            if done is not None:
                index, (new_scores, has_score, report) = done
                scores[index], kept[index] = new_scores, has_score
                why = why or report.first_error
        self.close()
        return scores, kept, why

    def close(self) -> None:
        """Starts no further calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)
