"""Rewards from a Python function: the user's own or a verifier. It may run while other responses are still being sampled."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from jaxalign.config import RewardConfig
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.parallel import hosts
from jaxalign.records import Prompt
from jaxalign.rewards.base import DroppedRows, Listener, Reward, RewardBatch, Scored, columns_of
from jaxalign.rewards.callables import RewardReport, call_reward, details
from jaxalign.rollout.responses import Response
from jaxalign.rollout.stops import response_text

Answered = tuple[np.ndarray, np.ndarray, RewardReport]
"""(scores float32 [n] or [n, T], kept bool [n], report) for n responses."""


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

    def result(self, rows: int) -> Answered:
        """The scores of all rows, with the first report of an error. Waits for all calls, and raises if `ask` does."""
        done = [result for call in self._calls if (result := call.result()) is not None]
        width = max((answered[0].shape[1] for _, answered in done if answered[0].ndim == 2), default=0)
        scores, kept = np.zeros((rows, width) if width else rows, np.float32), np.zeros(rows, bool)
        first = RewardReport()
        for taken, (new_scores, has_score, report) in done:
            for (row, response), score in zip(taken, new_scores, strict=True):
                if not width:
                    scores[row] = score
                elif np.ndim(score):
                    scores[row, : len(score)] = score
                elif response.ids:  # The only number of a response counts at its last token.
                    scores[row, len(response.ids) - 1] = score
            kept[[row for row, _ in taken]] = has_score
            first = report if first.first_error is None else first
        self.close()
        return scores, kept, first

    def close(self) -> None:
        """Starts no further calls."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class FunctionReward(Reward):
    """The reward from a function `(prompts, responses, **columns) -> scores`, called through `call_reward`.

    prompts are dialogues as lists of {"role", "content"}; columns are those of `columns_of`, and the `DETAILS` that it
    names. With several processes, the first one calls the function for all rows, since it may use the network or files.

    Args:
      name: the reward's name in metrics.
      fn: the function.
      settings: the retries, the time limit and the share of rows that may be dropped.
      tokenizer: decodes responses that are scored while others are sampled.
      label: the function's name in messages; None for `name`.
      in_run: as in `DroppedRows`.
    """

    is_checked = True

    def __init__(
        self, name: str, fn: Callable, settings: RewardConfig, tokenizer: Tokenizer, label: str | None = None,
        in_run: bool = True,
    ):
        self.name, self.fn, self.settings, self.tokenizer = name, fn, settings, tokenizer
        self._dropped = DroppedRows(label or name, settings.max_dropped_share, in_run)
        self._early: EarlyScores | None = None  # For the next rollout; only in the first process.
        self._listens = False  # In every process: whether the first process has early scores.

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """With `while_sampling`, a listener that calls the function with responses as they end; else None."""
        self._listens = self.settings.while_sampling
        if not self._listens or hosts.index() > 0:
            return None

        def ask(rows: Sequence[int], responses: Sequence[Response]) -> Answered:
            ended = [response.ended for response in responses]
            texts = [response_text(response, self.tokenizer.decode) for response in responses]
            return self._call([prompts[row] for row in rows], texts, [list(r.ids) for r in responses], ended)

        if self._early is not None:  # Left over from an abandoned rollout.
            self._early.close()
        self._early = EarlyScores(ask)
        return self._early.add

    def score(self, batch: RewardBatch) -> Scored:
        """Scores [B] or [B, N] from the host; rows without a score are dropped."""
        early, self._early = self._early, None
        # This fetches, so either all processes do it or none.
        given = None if self._listens else (batch.responses, batch.ids, batch.ended)
        self._listens = False

        cause: BaseException | None = None  # Only in the first process.

        def score_on_first() -> list:
            nonlocal cause
            scores, kept, report = early.result(len(batch.prompts)) if given is None else self._call(batch.prompts, *given)
            cause = report.cause
            return [scores.tolist(), kept.tolist(), report.first_error]

        scores, kept, why = hosts.once(score_on_first)
        self._dropped.check(len(kept) - sum(kept), len(kept), why, cause)
        scores = np.asarray(scores, np.float32)
        if scores.ndim == 2:
            scores = np.pad(scores, ((0, 0), (0, batch.rollout.logprobs.shape[1] - scores.shape[1])))
        return Scored(scores, np.asarray(kept, bool))

    def _call(
        self, prompts: Sequence[Prompt], texts: Sequence[str], ids: Sequence[Sequence[int]], ended: Sequence[bool]
    ) -> Answered:
        dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in prompts]
        limits = self.settings.retries, self.settings.timeout_s, self.settings.backoff_s
        return call_reward(self.fn, dialogues, texts, columns_of(prompts), *limits, details(self.tokenizer, ids, ended))
