"""The programs of PPO's first iteration, compiled while weights are read and responses are sampled."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from jaxalign.config import Config
from jaxalign.models.lora import apart, join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import placed
from jaxalign.placement.programs import Run, resharding
from jaxalign.placement.stage_programs import packed_parts, sampled_rollout
from jaxalign.records import Experience, PackedParts
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session
from jaxalign.rollout.warm_up import Described, described
from jaxalign.stages import rewards
from jaxalign.stages.base import StageContext
from jaxalign.stages.scorers import find_scorer
from jaxalign.training.ahead import Ahead, told_only
from jaxalign.training.checks import checked_rows, step_zero_values
from jaxalign.training.experience import packed_experience
from jaxalign.training.packed import part_rows
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
    step 0 are done. Does nothing on a mesh or with offloading: there, programs are compiled when they are called. What cannot
    be described is told, and no error.
    """
    if setup.policy.sharding is not None or config.mesh.offload:
        return
    with told_only("ppo"):
        programs = Programs(ahead, config, setup, engine, scores)
        later = programs.sample(sampling)
        if scores != "unknown" and config.ppo.advantages != "remax":
            programs.score()
        if not checked:
            programs.check()
        programs.learn()
        for program in later:
            ahead.add(*program)


class Programs:
    """What the iterations of one run call, described."""

    def __init__(self, ahead: Ahead, config: Config, setup: PPOSetup, engine: Engine, scores: Scores):
        section = config.ppo
        self.ahead, self.section, self.setup, self.engine = ahead, section, setup, engine
        self.run = Run(config, setup.reference, min(engine.bucket, engine.max_length - section.max_new_tokens))
        self.state, self.frozen = placed((abstract_ppo_state(self.setup), self.run.frozen))
        self.policy = join(self.frozen, self.state.policy.params)
        self.reference = self._own(self.run.start("ppo"))
        self.rollout = sampled_rollout(self.run, section.batch, section.max_new_tokens)
        self.scorer = scores if isinstance(scores, Scorer) and section.advantages != "remax" else None

    @functools.cached_property
    def experience(self) -> Experience:
        return placed(packed_experience.eval_shape(*self._scoring())[0])

    def _own(self, params: Params) -> Params:
        """Without the base that adapters share."""
        return placed(apart(self.run.frozen, params))

    def _packed(self, rows: int, plans: int | None = None) -> PackedParts:
        """So many rows of the rollout, in micro-batches."""
        T = self.rollout.tokens.shape[1]
        return packed_parts(self.run, rows, *part_rows(rows, T, self.section.micro_batch_tokens), T, plans)

    def sample(self, sampling: Sampling) -> Described:
        """What the first rows need. Returns what may be needed when some have ended."""
        moves, params, _ = resharding("ppo", "policy", self.setup.policy, self.policy, {})
        for move in moves:
            self.ahead.add(move.step, move.arguments)
        key, engine = placed(jax.eval_shape(lambda: jax.random.key(0))), self.engine
        session = Session(
            self.setup.policy, placed(params), key, sampling, engine.batch, engine.max_length, engine.bucket
        )
        first, later = described(session, engine.bucket, engine.batch // self.section.group_size)
        for program in first:
            self.ahead.add(*program)
        return later

    def score(self) -> None:
        self.ahead.add(packed_experience, self._scoring)

    def _scoring(self) -> tuple:
        B, state, scorer = self.section.batch, self.state, self.scorer
        critic = self.setup.critic_to_run(state)
        weights = None if scorer is None else self._own(join(self.run.frozen, scorer.model.abstract()))
        told = (self.run.rows(jnp.float32, B), self.run.rows(jnp.bool_, B)) if scorer is None else (None, None)
        baseline = self.run.rows(jnp.float32, B) if self.section.advantages == "remax" else None
        return (
            self.setup, self.setup.recomputes, scorer, self.reference, state.policy.params, critic, state.kl_coef, self.rollout,
            self._packed(B), *told, baseline, weights, self.frozen,
        )  # fmt: skip

    def check(self) -> None:
        B, T = self.rollout.tokens.shape
        some, rows, most = checked_rows(self.section, B, T)
        packed, state = packed_parts(self.run, some, rows, most, T), self.state
        own = self.setup, state.policy.params, self.frozen, self.reference
        self.ahead.add(step_zero_values, lambda: (*own, self.experience, state.kl_coef, packed, self.rollout.logprobs))

    def learn(self) -> None:
        updates, size = self.section.epochs * self.section.minibatches, self.section.batch // self.section.minibatches
        read = self.reference if self.setup.loss_reads_reference else None
        order = self.run.scalar(jnp.int32, (updates, size))
        packed = self._packed(size, updates)
        self.ahead.add(
            packed_update, lambda: (self.setup, self.state, self.experience, order, packed, self.frozen, read)
        )  # fmt: skip
