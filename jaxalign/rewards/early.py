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
    """Calls `ask(rows, responses) -> Answered` in one thread. Each call starts when the previous one returns, with all rows
    that have ended since."""

    def __init__(self, ask: Callable[[Sequence[int], Sequence[Response]], Answered]):
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "early scores")
        self._waiting: collections.deque[tuple[int, Response]] = collections.deque()
        self._calls: list[Future[tuple[list[tuple[int, Response]], Answered] | None]] = []

    def add(self, ended: Sequence[tuple[int, Response]]) -> None:
        """Receives (number in the batch, response) for rows that have just ended, each row once. Does not block."""
        self._waiting.extend(ended)
        self._calls.append(self._thread.submit(self._call))

    def _call(self) -> tuple[list[tuple[int, Response]], Answered] | None:
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not taken:
            return None
        return taken, self._ask([row for row, _ in taken], [response for _, response in taken])

    def result(self, rows: int) -> tuple[np.ndarray, np.ndarray, str | None, BaseException | None]:
        """(scores float32 [rows] or [rows, T], kept bool [rows], the first error or None, its `RewardReport.cause`). Waits for
        all calls, and raises if `ask` does."""
        done = [result for call in self._calls if (result := call.result()) is not None]
        width = max((answered[0].shape[1] for _, answered in done if answered[0].ndim == 2), default=0)
        scores, kept = np.zeros((rows, width) if width else rows, np.float32), np.zeros(rows, bool)
        why, cause = None, None
        for taken, (new_scores, has_score, report) in done:
            for (row, response), score in zip(taken, new_scores, strict=True):
                if not width:
                    scores[row] = score
                elif np.ndim(score):
                    scores[row, : len(score)] = score
                elif response.ids:  # The only number of a response counts at its last token.
                    scores[row, len(response.ids) - 1] = score
            kept[[row for row, _ in taken]] = has_score
            why, cause = (report.first_error, report.cause) if why is None else (why, cause)
        self.close()
        return scores, kept, why, cause

    def close(self) -> None:
        """Starts no further calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)
