"""The programs of PPO's first iteration, compiled while weights are read and responses are sampled."""

from __future__ import annotations

from typing import Literal

from jaxalign.config import Config
from jaxalign.models.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.ahead import Ahead, told_only
from jaxalign.parallel.rows import placed
from jaxalign.placement.ppo_programs import iteration_calls
from jaxalign.placement.programs import Run, resharding
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session
from jaxalign.rollout.warm_up import Described, described
from jaxalign.stages import rewards
from jaxalign.stages.base import StageContext
from jaxalign.stages.scorers import find_scorer
from jaxalign.training.checks import step_zero_values
from jaxalign.training.experience import packed_experience
from jaxalign.training.ppo_state import PPOSetup, abstract_ppo_state
from jaxalign.training.ppo_step import packed_update
from jaxalign.training.scorer import Scorer

Scores = Scorer | Literal["host", "unknown"]


def scores_of(context: StageContext, setup: PPOSetup) -> Scores:
    """What brings the scores: one reward model that scores with all else that is computed of a rollout, a function on the host,
    or what is not known before it is there, as a sum of several."""
    config = context.config
    source, *others = rewards.reward_sources(config)
    if others or config.reward.weights not in ((), (1.0,)) or config.reward.length_coef:
        return "unknown"
    if rewards.is_learnt(config):
        scorer, _ = find_scorer(context, source, setup.reference, config.ppo.score_clip)
        return "unknown" if scorer.ensemble else scorer
    return "host" if source in ("callable", "verifier") else "unknown"


def compile_ahead(
    ahead: Ahead, config: Config, setup: PPOSetup, engine: Engine, sampling: Sampling, scores: Scores, checked: bool
) -> None:
    """Begins to compile what an iteration calls, in the order in which it does; needs no weights.

    setup: the run's own, since optimizers equal only themselves. engine: as wide as the longest prompt. checked: the checks of
    step 0 are done. Does nothing with offloading: there, programs are compiled when they are called. What cannot be described
    is told, and no error.
    """
    if config.mesh.offload:
        return
    section = config.ppo
    with told_only("ppo"):
        run = Run(config, setup.reference, min(engine.bucket, engine.max_length - section.max_new_tokens))
        state = abstract_ppo_state(setup)
        first, later = _sampling(run, setup, engine, sampling, join(run.frozen, state.policy.params))
        scorer = scores if isinstance(scores, Scorer) and section.advantages != "remax" else None
        weights = None if scorer is None else join(run.frozen, scorer.model.abstract())
        told = scores == "host"
        calls = iteration_calls(run, setup, state, run.start("ppo"), scorer, weights, told, told, placed)
        programs = [*first]
        if scores != "unknown" and section.advantages != "remax":
            programs.append((packed_experience, calls.scoring))
        if not checked:
            programs.append((step_zero_values, calls.checks))
        for program in (*programs, (packed_update, calls.update), *later):
            ahead.add(*program)


def _sampling(run: Run, setup: PPOSetup, engine: Engine, sampling: Sampling, policy: Params) -> tuple[Described, Described]:
    """What the first rows need, weights brought to where sampling wants them among it, and what may be needed when some have
    ended."""
    moves, params, _ = resharding("ppo", "policy", setup.policy, placed(policy), {})
    session = Session(
        setup.policy, placed(params), placed(run.key()), sampling, engine.batch, engine.max_length, engine.bucket
    )
    first, later = described(session, engine.bucket, engine.batch // run.config.ppo.group_size)
    return [(move.step, move.arguments) for move in moves] + first, later
