"""Rewards from a Python function: the user's own or a verifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxalign.config import RewardConfig
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.parallel import hosts
from jaxalign.records import Prompt
from jaxalign.rewards.base import Listener, Reward, RewardBatch, Scored, columns_of
from jaxalign.rewards.callables import call_reward
from jaxalign.rewards.dropped import DroppedRows
from jaxalign.rewards.early import Answered, EarlyScores


class FunctionReward(Reward):
    """The reward from a function `(prompts, responses, **columns) -> scores`, called through `call_reward`.

    prompts are dialogues as lists of {"role", "content"}; columns are those of `columns_of`. With several processes, the first
    one calls the function for all rows, since the function may use the network or files.

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

        def ask(rows: Sequence[int], ids: Sequence[Sequence[int]]) -> Answered:
            return self._call([prompts[row] for row in rows], [self.tokenizer.decode(own) for own in ids])

        if self._early is not None:  # Left over from an abandoned rollout.
            self._early.close()
        self._early = EarlyScores(ask)
        return self._early.add

    def score(self, batch: RewardBatch) -> Scored:
        """Scores [B] from the host; rows without a score are dropped."""
        early, self._early = self._early, None
        responses = None if self._listens else batch.responses  # This fetches, so either all processes do it or none.
        self._listens = False

        def score_on_first() -> list:
            if responses is None:
                scores, kept, why = early.result(len(batch.prompts))
            else:
                scores, kept, report = self._call(batch.prompts, responses)
                why = report.first_error
            return [scores.tolist(), kept.tolist(), why]

        scores, kept, why = hosts.once(score_on_first)
        self._dropped.check(len(kept) - sum(kept), len(kept), why)
        return Scored(np.asarray(scores, np.float32), np.asarray(kept, bool))

    def _call(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> Answered:
        dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in prompts]
        settings = self.settings
        columns = columns_of(prompts)
        return call_reward(self.fn, dialogues, texts, columns, settings.retries, settings.timeout_s, settings.backoff_s)
