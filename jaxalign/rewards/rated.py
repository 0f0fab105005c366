"""The reward from direct AI feedback: a judge rates each response (Lee et al. 2023, arXiv 2309.00267)."""

from __future__ import annotations

import jax
import numpy as np

from jaxalign.algorithms.labels import direct_reward
from jaxalign.data.chat.styles import finish_answer
from jaxalign.feedback.rater import Rater
from jaxalign.rewards.base import Reward, RewardBatch, Scored
from jaxalign.rewards.dropped import DroppedRows


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
