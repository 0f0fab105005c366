"""The reward from a learned model that reads the policy's tokens: the preference model or its student."""

from __future__ import annotations

import dataclasses

from jaxalign.rewards.base import FusedReward, Reward, RewardBatch, Scored
from jaxalign.rewards.scorer import Scorer, rollout_scores
from jaxalign.steps.offload import FrozenRole


@dataclasses.dataclass(eq=False)
class LearntReward(Reward):
    """Normalised scores of a reward model with the policy's tokenizer.

    Attributes:
      scorer: the model with its normalisation.
      role: the model's weights.
      name: the reward's name, which is "preference" or "distilled" in a pipeline run.
    """

    scorer: Scorer
    role: FrozenRole
    name: str = "preference"
    is_checked = True

    def score(self, batch: RewardBatch) -> Scored:
        """Scores [B], computed on the devices."""
        with self.role.on_device() as params:
            return Scored(rollout_scores(self.scorer, params, batch.rollout))

    def fused(self) -> FusedReward | None:
        """Fused unless the weights are offloaded, since those are on the devices only while they score."""
        return None if self.role.offloaded else FusedReward(self.scorer, self.role)
