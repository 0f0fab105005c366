"""The programs of PPO's first iteration, compiled while weights are read and responses are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxalign.config import Config
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.ahead import Ahead, told_only
from jaxalign.parallel.rows import placed
from jaxalign.planner.ppo_programs import iteration_calls
from jaxalign.planner.programs import Run, resharding
from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.scorer import Scorer
from jaxalign.rewards.sums import is_single
from jaxalign.rl.checks import step_zero_values
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import packed_experience
from jaxalign.rl.state import PPOSetup, abstract_ppo_state
from jaxalign.rl.update import packed_update
from jaxalign.rollout.decode import decode_chunk
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.forecast import Described, forecast, know
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import find_scorer

Scores = Scorer | Literal["host", "unknown"]
FIRST = 2
"""Layouts of the sampler's ring that are compiled before all that follows sampling."""


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


def compile_ahead(
    ahead: Ahead, config: Config, setup: PPOSetup, engine: Engine, sampling: Sampling, prompts: Sequence[Sequence[int]],
    scores: Scores, checked: bool,
) -> None:  # fmt: skip
    """Begins to compile what an iteration calls, in the order in which it does; needs no weights.

    setup: the run's own, since optimizers equal only themselves. engine: as wide as the longest prompt. prompts: those of an
    iteration. checked: the checks of step 0 are done. Does nothing with offloading: there, programs are compiled when they are
    called. What cannot be described is told, and no error.
    """
    if config.mesh.offload:
        return
    section = config.ppo
    with told_only("ppo"):
        run = Run(config, setup.reference, min(engine.bucket, engine.max_length - section.max_new_tokens))
        state = abstract_ppo_state(setup)
        sampled = _sampling(run, setup, engine, sampling, prompts, join(run.frozen, state.policy.params))
        scorer = scores if isinstance(scores, Scorer) and not estimator_of(section).needs_greedy else None
        weights = None if scorer is None else join(run.frozen, scorer.model.abstract())
        told = scores == "host"
        calls = iteration_calls(run, setup, state, run.start("ppo"), scorer, weights, told, told, placed)
        programs = []
        if scores != "unknown" and not estimator_of(section).needs_greedy:
            programs.append((packed_experience, calls.scoring))
        if not checked:
            programs.append((step_zero_values, calls.checks))
        programs.append((packed_update, calls.update))
        # The first chunks can be drawn, and then what takes longest to compile is begun.
        chunks = [i for i, (step, _) in enumerate(sampled) if step is decode_chunk][:FIRST]
        for step, arguments in (*sampled[: chunks[-1] + 1], *programs, *sampled[chunks[-1] + 1 :]):
            know(step, arguments)
            ahead.add(step, arguments)


def _sampling(run: Run, setup: PPOSetup, engine: Engine, sampling: Sampling, prompts, policy: Params) -> list[Described]:
    """What it takes to answer the prompts; weights are brought to where sampling wants them first."""
    moves, params, _ = resharding("ppo", "policy", setup.policy, placed(policy), {})
    session = engine.start(placed(params), prompts, placed(run.key()), sampling, range(len(prompts)))
    return [*((move.step, move.arguments) for move in moves), *forecast(session)]
