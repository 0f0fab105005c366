"""How the reward of a run computes its scores, as far as that is known before any weights are read."""

from __future__ import annotations

from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.sums import is_single
from jaxalign.rl.ahead import Scores
from jaxalign.rl.state import PPOSetup
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import find_scorer


def scores_of(context: StageContext, setup: PPOSetup) -> Scores:
    """Where the scores come from: the scorer that is fused into the scoring program, a function on the host, or "unknown" until
    the reward is made, as for a sum."""
    config = context.config
    records = reward_records(config.reward.source)
    if not is_single(config.reward):
        return "unknown"
    if records[0].learnt:
        scorer, _ = find_scorer(context, records[0].name, setup.reference, config.ppo.score_clip)
        return "unknown" if scorer.ensemble else scorer
    return "host" if records[0].host else "unknown"
