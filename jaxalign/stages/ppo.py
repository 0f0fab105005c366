"""ppo: reinforcement learning from AI feedback, by PPO or a relative without a critic (config.ppo.advantages).

Samples, scores by what config.reward names, learns, again and again. Reads the weights RL starts from (policy and reference)
and what the reward needs: preference (which the critic then starts from), reward_distill, or the base as the feedback model.
Writes checkpoints, params (the policy's), metrics, the step-0 checks and a summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.masked import masked_mean
from jaxalign.config import Config, Ppo
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader
from jaxalign.models import flops
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params, scalar_from_lm
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import place_rows
from jaxalign.planner.programs import Run
from jaxalign.records import Prompt, Rollout
from jaxalign.rewards.base import Reward, RewardBatch, Scored
from jaxalign.rewards.scorer import LearntScore
from jaxalign.rl.ahead import compile_ahead
from jaxalign.rl.arguments import SamplerArguments
from jaxalign.rl.checks import (
    act_on,
    gap_check,
    gradients_check,
    ratio_check,
    sampler_difference,
    unexplained,
)
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import make_experience
from jaxalign.rl.shaping import greedy_baseline
from jaxalign.rl.state import PPOSetup, PPOState, abstract_ppo_state, init_ppo_state, make_ppo_setup
from jaxalign.rl.step_zero import step_zero_checks
from jaxalign.rl.update import ppo_update
from jaxalign.rollout.engine import Engine, Heard
from jaxalign.rollout.sampling import Sampling
from jaxalign.stages.shared import common, rewards, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.ppo_ahead import scores_of
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.timing import Timeline
from jaxalign.training import work
from jaxalign.training.checkpoint import copy_params, load_params, save_params
from jaxalign.training.offload import FrozenRole, check_host_memory, optimizer_to_device, optimizer_to_host
from jaxalign.training.packed import part_rows, rows_split

CHECKS = "checks.json"


class PPO(Stage):
    name = "ppo"
    config_fields = (
        *common.MODEL_FIELDS, "data", "world", "arithmetic", "preference.max_length", "reward", "ppo", "feedback.constitution",
        "feedback.reasoning", "feedback.max_reasoning_tokens", "feedback.reasoning_temperature",
    )  # fmt: skip

    def inputs(self, config: Config) -> tuple[str, ...]:
        read = rewards.reward_stages(config)
        base = [stage for stage in read if stage in common.base_stages(config)]
        return tuple(dict.fromkeys((*base, *common.policy_stages(config, self.name), *read)))

    def files(self, config: Config):
        return common.base_files(config) | sources.data_files(config) | rewards.reward_files(config)

    def run(self, context: StageContext) -> None:
        with Ahead() as ahead:
            self._run(context, ahead)

    def _run(self, context: StageContext, ahead: Ahead) -> None:
        config, section = context.config, context.config.ppo
        check_host_memory(config.mesh)
        tokenizer = common.load_tokenizer(context)
        policy = common.make_model(config, tokenizer.vocab_size)
        setup = make_ppo_setup(section, policy)
        prompts = sources.prompts(context, tokenizer, "rl", section.prompts, section.max_new_tokens)
        encoded = [styles.encode_prompt(tokenizer, p.messages, config.data.style) for p in prompts]
        checked = hosts.once((context.directory / CHECKS).exists)
        if not config.mesh.offload:  # Otherwise the arguments of the first call are in host memory.
            planned = Run(config, setup.reference)
            compile_ahead(
                ahead, setup, engine_of(config, setup, encoded), common.sampling(section, tokenizer, config.data.style),
                first_batch(config, encoded), scores_of(context, setup), planned.frozen, planned.start("ppo"), checked,
            )  # fmt: skip
        start = common.policy_params(context, policy, self.name)
        frozen = common.frozen_params(context, policy)
        reward = rewards.make_reward(context, policy, tokenizer)
        reference = common.frozen_role(context, policy, start)
        iteration = Iteration(context, setup, reference, reward, prompts, encoded, tokenizer, frozen)
        loop = common.loop(
            context, policy, section.iterations, section.checkpoint_every, shown=("score", "kl_k1"),
            timeline=iteration.timeline,
        )  # fmt: skip

        def init() -> PPOState:
            with reference.on_device() as start:
                policy, critic = self._policy(context, setup, start), self._critic(context, setup, start)
            return iteration.rest(init_ppo_state(setup, policy, critic, common.stage_key(config, self.name)))

        state = loop.run(init, iteration.rest(abstract_ppo_state(setup)), iteration)
        iteration.settle()
        save_params(context.directory / "params", without_value_head(state.policy.params))
        write_json(context.directory / "summary.json", self._summary(context))

    def _policy(self, context: StageContext, setup: PPOSetup, start: Params) -> Params:
        """Fresh buffers of the weights RL trains, with a value head of zeros where the critic is one."""
        params = common.trained_params(context, setup.reference, start, self.name)
        if not setup.shares_trunk:
            return params
        head = setup.policy.abstract()["score"]
        return params | {"score": jnp.zeros(head.shape, head.dtype, device=head.sharding)}

    def _critic(self, context: StageContext, setup: PPOSetup, start: Params) -> Params | None:
        """What the critic starts from: the preference model where it or its student rewards; else the policy's trunk with
        values of 0."""
        if not setup.has_critic or setup.shares_trunk:
            return None
        if rewards.is_learnt(context.config):
            return load_params(context.input_directory("preference") / "params", setup.critic)
        if setup.critic.lora is not None:
            return setup.critic.init_adapters(start, common.stage_key(context.config, self.name, "critic"))
        critic = scalar_from_lm(start, setup.critic.init(common.stage_key(context.config, self.name, "critic")))
        return copy_params(critic | {"score": jnp.zeros_like(critic["score"])})

    def _summary(self, context: StageContext) -> dict:
        rows = read_metrics(context.directory / "metrics.jsonl")
        checks = json.loads((context.directory / CHECKS).read_text(encoding="utf-8"))
        summary = {"iterations": len(rows), "checks": checks, "stopped_early": int(sum(r["stopped_early"] for r in rows))}
        summary |= {"reward_first": rows[0]["reward"], "reward_last": rows[-1]["reward"], "kl_last": rows[-1]["kl_k1"]}
        summary |= {"score_first": rows[0]["score"], "score_last": rows[-1]["score"]}
        return summary | {"sampler_gap_max": max(row["sampler_gap"] for row in rows)}


def without_value_head(params: Params) -> Params:
    """The policy alone, as other stages read it."""
    return {name: value for name, value in params.items() if name != "score"}


def engine_of(config: Config, setup: PPOSetup, prompts) -> Engine:
    """Samples for all iterations, at one prompt length: one compilation."""
    bucket = -(-max(len(prompt) for prompt in prompts) // 8) * 8
    return Engine(setup.policy, config.ppo.batch, config.model.max_length, bucket)


def loader_of(config: Config, prompts) -> EpochLoader:
    """The prompts of each iteration."""
    return EpochLoader(len(prompts), config.ppo.batch // config.ppo.group_size, config.seed, streams.LOADERS["ppo"])


def asked(loader: EpochLoader, section: Ppo, step: int) -> list[int]:
    """The prompt of each row. The responses to one prompt stand together: groups are contiguous rows."""
    return [int(i) for i in loader.indices(step) for _ in range(section.group_size)]


def first_batch(config: Config, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The rows' prompts of the first iteration."""
    return [prompts[i] for i in asked(loader_of(config, prompts), config.ppo, 0)]


class Iteration:
    """One iteration as the loop calls it: (state, step) -> (state, metrics)."""

    def __init__(
        self, context: StageContext, setup: PPOSetup, reference: FrozenRole, reward: Reward, questions: Sequence[Prompt],
        prompts: Sequence[Sequence[int]], tokenizer, frozen: Params | None = None,
    ):  # fmt: skip
        self.context, self.setup, self.reference, self.reward, self.prompts = context, setup, reference, reward, prompts
        self.questions, self.tokenizer = questions, tokenizer
        self.frozen, self.offloads_optimizer = frozen, "optimizer" in context.config.mesh.offload
        self.fused = reward.fused()
        section = context.config.ppo
        self.sampling = common.sampling(section, tokenizer, context.config.data.style)
        self.pending: tuple[int, jax.Array, jax.Array] | None = None
        self.timeline = Timeline()
        self.loader = loader_of(context.config, prompts)
        self.engine = engine_of(context.config, setup, prompts)
        row_length = min(self.engine.bucket + section.max_new_tokens, self.engine.max_length)
        part_rows(section.batch, row_length, section.micro_batch_tokens, *rows_split(setup.policy.sharding))

    def __call__(self, state: PPOState, step: int):
        config, setup = self.context.config.ppo, self.setup
        index = asked(self.loader, config, step)
        batch = [self.prompts[i] for i in index]
        key = jax.random.fold_in(jax.random.wrap_key_data(state.policy.key), step)
        rows = range(step * config.batch, (step + 1) * config.batch)
        policy = join(self.frozen, state.policy.params)
        sampled = self._sample(policy, batch, key, rows, self.sampling, self.reward.listen(self._questions(index)))
        with self.timeline.phase("score") as phase:
            experience, metrics = jax.block_until_ready(self._score(state, policy, batch, key, rows, index, step, sampled))
            phase.tokens, phase.flops = self._scoring()
        self.settle()
        if setup.recomputes and config.checks.sampler_gap == "stop":
            gap = gap_check(float(metrics["sampler_gap"]), config.sampler_tolerance, f" at iteration {step}")
            act_on((gap,), config.checks, "ppo")
        with self.timeline.phase("update") as phase:
            state, learnt = jax.block_until_ready(self._update(state, experience))
            epochs = float(learnt["epochs_run"])
            phase.tokens, phase.flops = round(epochs * np.sum(self.lengths)), epochs * self._learning()
        self.pending = (step, learnt["sampler_gap"], unexplained(learnt))
        if config.checks.finite_gradients == "stop":
            self.settle()
        # Where they are recomputed, what is learnt from are the trainer's own log-probs; the gap is that of the rollout.
        return state, {**learnt, **metrics} if setup.recomputes else {**metrics, **learnt}

    def _sample(
        self, policy: Params, prompts, key: jax.Array, rows: range, sampling: Sampling, heard: Heard | None
    ) -> Rollout:
        """A rollout on the devices, split over the batch's axes."""
        with self.timeline.phase("generate") as phase:
            sampled = self.engine.rollout(policy, prompts, key, rows, sampling, heard)
            self.lengths = sampled.prompt_length + sampled.response_length
            phase.tokens, phase.flops = work.sampled(self.setup.reference, sampled)
            self.answered = phase.tokens
            return place_rows(self.setup.policy.sharding, sampled)

    def _score(self, state: PPOState, policy: Params, prompts, key, rows: range, index, step: int, sampled: Rollout):
        """(experience, metrics) of a rollout: scores, log-probs, values, advantages."""
        config, setup = self.context.config.ppo, self.setup
        recompute = setup.recomputes or self._must_recompute(policy, step, sampled)
        scored, baseline = None if self.fused else self._scored(sampled, index, rows), None
        kept = None if scored is None else scored.kept
        if estimator_of(config).needs_greedy:
            greedy = dataclasses.replace(self.sampling, temperature=0.0)
            best = place_rows(setup.policy.sharding, self.engine.rollout(policy, prompts, key, rows, greedy))
            greedy_scored = self._scored(best, index, rows)
            baseline = greedy_baseline(config, best, jnp.nan_to_num(jnp.asarray(greedy_scored.scores)))
            if greedy_scored.kept is not None:
                kept = greedy_scored.kept if kept is None else kept & greedy_scored.kept
        critic = policy if setup.shares_trunk else join(self.frozen, state.critic.params) if setup.has_critic else None
        with self.reference.on_device() as reference, self._scores(scored) as scores:
            experience, metrics = make_experience(
                setup, recompute, reference, policy, critic, state.kl_coef, sampled, scores, kept, baseline, self.frozen
            )
            if step == 0:
                self._check(state, sampled, experience, reference)
        counted = sampled.prompt_length > 0 if kept is None else (sampled.prompt_length > 0) & jnp.asarray(kept)
        parts = {} if scored is None else scored.parts
        return experience, metrics | {f"score_{name}": masked_mean(values, counted) for name, values in parts.items()}

    def _questions(self, index: Sequence[int]) -> list[Prompt]:
        return [self.questions[i] for i in index]

    def _scored(self, rollout: Rollout, index: Sequence[int], rows: range) -> Scored:
        return self.reward.score(RewardBatch(rollout, self._questions(index), rows.start, self.tokenizer))

    def _scoring(self) -> tuple[int, float]:
        """(tokens, operations) of scoring the last rollout: by reference, critic and the run's own reward model."""
        setup = self.setup
        own = flops.forward(setup.critic, self.lengths) if setup.runs_critic else 0.0
        if self.fused:
            scorer = self.fused.scorer
            own += scorer.members * flops.forward(scorer.model, self.lengths)
        return int(np.sum(self.lengths)), own + flops.forward(setup.reference, self.lengths, self.answered)

    def _learning(self) -> float:
        """Operations of one epoch over the last rollout."""
        setup = self.setup
        critic = flops.learning(setup.critic, self.lengths) if setup.has_critic and not setup.shares_trunk else 0.0
        return critic + flops.learning(setup.policy, self.lengths, self.answered)

    def rest(self, state: PPOState) -> PPOState:
        """A state, or its description, as it is outside of the update."""
        return optimizer_to_host(state) if self.offloads_optimizer else state

    @contextlib.contextmanager
    def _scores(self, scored: Scored | None):
        """What `make_experience` takes: the scores, or the model that gives them with its weights on the devices."""
        if scored is not None:
            yield scored.scores
            return
        with self.fused.role.on_device() as params:
            yield LearntScore(self.fused.scorer, params)

    def _update(self, state: PPOState, experience):
        if self.offloads_optimizer:
            state = optimizer_to_device(state)
        read = self.reference.on_device() if self.setup.loss_reads_reference else contextlib.nullcontext()
        with read as reference:
            state, metrics = ppo_update(self.setup, state, experience, self.frozen, reference)
        return self.rest(state), metrics

    def settle(self) -> None:
        """Checks the last iteration that was not checked. Called one late, when it has been computed, so that nothing waits.

        In float16 an overflow that only halves the loss scale is no failed check (`checks.unexplained`).
        """
        if self.pending is None:
            return
        config, (step, gap, skipped) = self.context.config.ppo, self.pending
        policies, self.pending = config.checks, None
        trained = 2 if self.setup.has_critic and not self.setup.shares_trunk else 1
        found = (gradients_check(
            float(skipped) / trained, f"share of the updates of iteration {step} whose gradient is not finite"
        ),)  # fmt: skip
        if policies.sampler_gap == "warn" and not self.setup.recomputes:
            found = (gap_check(float(gap), config.sampler_tolerance, f" at iteration {step}"), *found)
        act_on(found, policies, "ppo")

    def _must_recompute(self, policy: Params, step: int, sampled) -> bool:
        """Whether the old log-probs must be recomputed; UserError where the config says to stop instead."""
        config, when = self.context.config.ppo, f" at iteration {step}"
        policies = config.checks
        if policies.ratio == policies.sampler_gap == "warn":  # Told in time by the first minibatch of the update.
            return False
        found = sampler_difference(SamplerArguments(
            model=self.setup.policy, temperature=config.temperature, params=policy, rollout=sampled
        ))
        gap = gap_check(float(found.gap), config.sampler_tolerance, when)
        if policies.sampler_gap != "warn" and act_on((gap,), policies, "ppo"):
            return True
        ratio = ratio_check(float(found.ratio), config.sampler_tolerance, when)
        return policies.ratio != "warn" and act_on((ratio,), policies, "ppo")

    def _check(self, state: PPOState, sampled, experience, reference: Params) -> None:
        checks = step_zero_checks(
            self.setup, reference, state.policy.params, sampled, experience, state.kl_coef, self.frozen
        )
        write_json(self.context.directory / CHECKS, [dataclasses.asdict(check) for check in checks])
        policies = self.context.config.ppo.checks
        told = policies.sampler_gap != "warn" and not self.setup.recomputes  # by `_must_recompute`
        act_on(tuple(check for check in checks if not (told and check.field == "sampler_gap")), policies, "ppo")


STAGE = PPO()
