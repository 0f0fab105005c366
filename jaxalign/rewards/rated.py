"""The reward from direct AI feedback: a judge rates each response (Lee et al. 2023, arXiv 2309.00267)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.labels import direct_reward
from jaxalign.data.chat.styles import finish_answer
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.judge import Draw, RatingRequest
from jaxalign.records import Principle, Prompt
from jaxalign.rewards.base import DroppedRows, Reward, RewardBatch, Scored


@dataclasses.dataclass(frozen=True)
class Rater:
    """Rates responses under a constitution.

    Attributes:
      judge: any `Judge`, wrapped in `CheckedJudge`.
      constitution: the principles to draw from.
      principles: the number of principles drawn for each response; their ratings are averaged.
      seed: determines which principles are drawn.
    """

    judge: CheckedJudge
    constitution: tuple[Principle, ...]
    principles: int
    seed: int

    def rate(self, prompts: Sequence[Prompt], responses: Sequence[str], key: jax.Array, first_row: int) -> np.ndarray:
        """Rates each response.

        Args:
          prompts: B prompts, whose global rows are first_row + i.
          responses: B texts.
          key: the PRNG key of the judge's reasoning.

        Returns:
          float32 [B], ratings in 1..10; NaN for a response without a rating under any principle.
        """
        count = self.principles
        rows, stream = range(first_row, first_row + len(prompts)), streams.PRINCIPLES["ratings"]
        drawn = draw_principles(self.constitution, rows, count, self.seed, stream)
        requests = [
            RatingRequest(prompt.messages, response, rule)
            for prompt, response, rules in zip(prompts, responses, drawn, strict=True)
            for rule in rules
        ]
        begin = first_row * count
        with self.judge.loaded() as judge:
            results = judge.rate(requests, Draw(key, range(begin, begin + len(requests))))
        values = [np.nan if result.rating is None else result.rating for result in results]
        ratings = np.asarray(values, np.float32).reshape(len(prompts), count)
        rated = np.isfinite(ratings)
        total = np.sum(np.where(rated, ratings, 0), axis=1)
        return np.where(rated.any(axis=1), total / np.maximum(rated.sum(axis=1), 1), np.nan).astype(np.float32)


class RatedReward(Reward):
    """The expected rating of each response, mapped from 1..10 to -1..1.

    Args:
      rater: rates responses with any judge.
      key: the PRNG key of the judge's reasoning.
      max_dropped_share: see `DroppedRows`.
      style: the style of the policy's dialogues; the judge reads the answer in a response (`styles.finish_answer`).
    """

    is_checked = True

    def __init__(self, rater: Rater, key: jax.Array, max_dropped_share: float, style: str = "plain"):
        self.name = "ai_feedback"
        self.rater, self.key, self.style = rater, key, style
        self._dropped = DroppedRows(self.name, max_dropped_share)

    def score(self, batch: RewardBatch) -> Scored:
        """Scores [B]; responses without a rating are dropped."""
        answers = [finish_answer(text, True, self.style)[0] for text in batch.responses]
        ratings = self.rater.rate(batch.prompts, answers, self.key, batch.first_row)
        rated = np.isfinite(ratings)
        why = ("the judge gave no rating: its reasoning did not end, the dialogue is too long for it, or most of its "
               "probability lies outside of the ratings (feedback.max_outside_mass)")
        self._dropped.check(int(np.sum(~rated)), len(rated), why)
        return Scored(np.asarray(direct_reward(np.where(rated, ratings, 5.5))), rated)
