"""How a run's reward computes its scores, as far as the config determines it, before any weights are read."""

from __future__ import annotations

from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.sums import is_single
from jaxalign.rl.ahead import Scores
from jaxalign.rl.state import PPOSetup
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import find_scorer


def scores_of(context: StageContext, setup: PPOSetup) -> Scores:
    """The source of the scores: the scorer that is fused into the scoring program, "host" for a function on the host, or
    "unknown" if only the constructed reward can tell, as for a sum."""
    config = context.config
    records = reward_records(config.reward.source)
    if not is_single(config.reward):
        return "unknown"
    if records[0].learnt:
        scorer, _ = find_scorer(context, records[0].name, setup.reference, config.ppo.score_clip)
        return "unknown" if scorer.ensemble else scorer
    return "host" if records[0].host else "unknown"
