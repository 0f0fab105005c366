"""The public trainer for RL: PPO and its variants."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax

from jaxalign import streams
from jaxalign.config import PPOConfig
from jaxalign.config.schema import checked
from jaxalign.data.chat.styles import naming
from jaxalign.data.loader import EpochLoader
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import strip_frozen
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.role_meshes import moved
from jaxalign.records import Prompt
from jaxalign.rewards.base import Reward
from jaxalign.rewards.checked import as_reward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rewards.sums import sum_of_rewards
from jaxalign.rl.ahead import compile_ahead
from jaxalign.rl.checks import Check
from jaxalign.rl.iteration import Iteration, PromptStream
from jaxalign.rl.placed import PlacedIteration, RoleWeights
from jaxalign.rl.placing import FLAT
from jaxalign.rl.program_times import recorded_in
from jaxalign.rl.sampled_ahead import AheadRollouts
from jaxalign.rl.state import (
    PPOState,
    abstract_ppo_state,
    critic_from,
    init_ppo_state,
    make_ppo_setup,
    with_value_head,
    without_value_head,
)
from jaxalign.rollout.sampler import Engine, make_sampler, require_sampler
from jaxalign.rollout.sampling import section_sampling
from jaxalign.rollout.stops import checked_stops
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.early_stopping import SCORE
from jaxalign.steps.offload import FrozenRole
from jaxalign.trainers.base import CHECKS, PolicyTrainer, Step
from jaxalign.trainers.extent import RL, rate_warning, schedule_warning, warn_of_extent, warn_of_same_rows
from jaxalign.trainers.inputs import TrainerInputs, model_inputs, named_arguments, peak_flops, settings_from
from jaxalign.trainers.ppo_parts import PPOParts, placed_reward, require_same_tokenizer, trainer_shardings
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.rows import as_prompts, require_equal_columns


class PPO(PolicyTrainer):
    """Reinforcement learning of a language model, with any advantage estimator and policy loss.

        def brief(prompts, responses, **columns):
            return [-len(response) / 100 for response in responses]

        trainer = PPO(load_model("FOLDER"), reward=brief, iterations=50, batch=64, max_new_tokens=64, kl_coef=0.1)
        for step in trainer.fit(["Once upon a time"]):
            print(step.metrics["score"])
        trainer.policy.save("OUT")

    Args:
      policy: the language model to start from; it is not changed.
      reward: a function `(prompts, responses, **columns) -> scores`, a trained `RewardModel`, a `jaxalign.rewards.base.Reward`,
        a `RewardSource` or the name of a registered one, the name of a verifier, or "package.module:name" or "FILE.py:name"
        for one of these; or a list of rewards, whose weighted sum is the reward. The metric score_NAME is the mean of each.
      reward_weights: one factor for each reward of a list; None for 1 each.
      reference: the model that the KL is measured against, of the policy's architecture; None for the initial policy.
      start_critic: a trained `RewardModel` whose weights the critic starts from; None for the policy's trunk with a zero value
        head.
      sampler: samples the responses: a registered name, "package.module:name", "FILE.py:name", a
        `jaxalign.rollout.sampler.TokenSampler`, or a function that takes an engine and returns one; None for this process's
        engine.
      stop: texts that end a response, as in `Sampler.generate`; rewards read the text before the first of them.
      placement: the devices of each role (docs/placement.md): "flat", "interleave", "separate", or a list of entries such as
        ["policy+critic=0-3:fsdp=4", "reference+reward=4-5", "generator=6-7:tensor=2"]. The policy keeps the mesh with which it
        was loaded.
      directory: for metrics, checkpoints, the step-0 checks and exact resume; None keeps everything in memory.
      seed: seeds the samples and the order of the prompts.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      fields: fields of the config section `ppo`, such as iterations, batch, advantages, policy_loss and kl_coef.

    Attributes:
      checks: the step-0 checks; empty until they have run.
      setup: models, optimizers and options of the run.

    Raises:
      UserError: an argument is not a field of the section, has a value that the section does not accept, or has the wrong type.
    """

    name = "PPO"
    checks: tuple[Check, ...] = ()

    def __init__(
        self, policy: LanguageModel, reward: Any, *, reward_weights: Sequence[float] | None = None,
        reference: LanguageModel | None = None, start_critic: RewardModel | None = None, sampler: Any = None,
        stop: Sequence[str] = (), placement: str | Sequence[str] = FLAT, directory=None, seed=0, trackers=(), progress=False,
        **fields: Any,
    ):
        if "prompts" in fields:
            raise UserError("PPO(prompts) is not an argument; pass the prompts to PPO.fit(prompts)")
        section = settings_from(PPOConfig(), fields, self.name, policy)
        if section.alarms.every or section.helpful_share is not None:
            name = "alarms" if section.alarms.every else "helpful_share"
            raise UserError(f"PPO({name}) is not an argument; only stage ppo of a run has helpful prompts to read: measure the "
                            "policy between the steps of PPO.fit, and mix the prompts before it")
        options = {"directory": directory, "seed": seed, "trackers": trackers, "progress": progress}
        inputs = model_inputs(policy, section, self.name, **options, argument="policy")
        # The keys of stage ppo, so that a stage and a trainer with the same seed draw the same random numbers.
        root = jax.random.fold_in(inputs.root_key, streams.STAGES["ppo"])
        super().__init__(
            dataclasses.replace(inputs, key=jax.random.fold_in(root, streams.STATE), root_key=root), section
        )
        self.setup = make_ppo_setup(section, policy.model)
        scorer, weights = self._as_reward(reward, reward_weights), self._reference_weights(reference)
        shardings = trainer_shardings(placement, section, policy.model, scorer)
        if shardings is not None:
            self.setup = make_ppo_setup(section, policy.model, shardings.get("critic"))
            scorer = placed_reward(scorer, shardings)
        if start_critic is not None:
            self._critic_weights(start_critic)  # Raises an error for an unsuitable critic before anything runs.
        if sampler is not None:
            require_sampler(sampler, "PPO(sampler)")
        self._parts = PPOParts(
            policy.tokenizer, section_sampling(section, policy.stop_ids), policy.max_length,
            reward=lambda: scorer,
            reference=None if reference is None else lambda: weights,
            critic=None if start_critic is None else lambda: copy_params(self._critic_weights(start_critic)),
            sampler=sampler, stop=checked_stops(stop, "PPO(stop)"), shardings=shardings,
        )

    @classmethod
    def from_parts(cls, inputs: TrainerInputs, section: PPOConfig, parts: PPOParts) -> Self:
        """A trainer whose weights are read while its programs compile. section: a valid config section."""
        trainer = cls.from_inputs(inputs, section)
        critic = None if parts.shardings is None else parts.shardings.get("critic")
        trainer._parts, trainer.setup = parts, make_ppo_setup(section, inputs.model, critic)
        return trainer

    @named_arguments
    def fit(
        self, prompts: Any, held_out: Any = None, *, eval_every: int = 0, patience: int | None = None
    ) -> Iterator[Step]:
        """Trains on prompts and yields each iteration.

        Args:
          prompts: a list of texts, of message lists, or of {"prompt": either, ...} whose other entries are columns for the
            reward; or a mapping of columns. Prompts are shuffled in each epoch, and repeat if an iteration needs more.
          held_out: prompts in the same form, to each of which a response is sampled, always with the same random numbers; the
            mean of their rewards is measured as "held_out_score". None: no prompts.
          eval_every: iterations between these measurements, besides the one after the last; 0: an epoch of the prompts.
          patience: stop after this many consecutive measurements without a higher mean, and keep the weights with the highest;
            None: train all iterations and keep the newest weights.

        Raises:
          UserError: there are no prompts, a prompt is malformed or too long, or their columns differ.
        """
        (asked, ids), section = self._encoded(prompts, "prompts"), self.section
        measured, measured_ids = ((), ()) if held_out is None else self._encoded(held_out, "held_out")
        warn_of_same_rows("PPO.fit", asked, measured)

        def measure(params: Params, completed: int) -> dict[str, float]:
            key = jax.random.fold_in(self.inputs.root_key, streams.KEYS["ppo"]["held out"])
            return {SCORE: self._iteration.mean_score(params, measured, measured_ids, key, completed)}

        epoch = EpochLoader(len(ids), section.batch // section.group_size, self.inputs.seed).steps(1)
        self.stopping = self._held_out(
            held_out, eval_every, patience, measure, epoch, metric=SCORE, params_of=self._trained_params
        )
        steps = self.fit_encoded(asked, ids)
        # Raise for long prompts before anything runs.
        self._engine.padding.check([*ids, *measured_ids], section.max_new_tokens)
        options = {"eval_every": eval_every, "patience": patience, "stop": self._parts.stop}
        self._claim(ids if held_out is None else (ids, measured_ids), **options)
        return steps

    def _encoded(self, prompts: Any, argument: str) -> tuple[list[Prompt], list[list[int]]]:
        """(the prompts of an argument of `fit`, their token ids)."""
        asked = as_prompts(prompts, f"PPO.fit({argument})")
        require_equal_columns(asked, f"PPO.fit({argument})")
        ids = []
        for prompt in asked:
            with naming(prompt.id):
                ids.append(self.inputs.language_model.prompt_ids(prompt))
        return asked, ids

    def fit_encoded(self, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]]) -> Iterator[Step]:
        """Trains on prompts and yields each iteration.

        Args:
          prompts: the prompts, with the columns that the reward reads.
          ids: their token ids.

        Raises:
          UserError: the mesh does not divide the batch, a check or an alarm that is configured to stop the run does so, or a
            plug-in returns an invalid result.
        """
        section = self.section
        self._stream = PromptStream(
            prompts, ids, section.batch, section.group_size, self.inputs.seed, streams.LOADERS["ppo"]
        )
        sampled = self.setup.policy
        if self._parts.shardings is not None:
            sampled = sampled.on(self._parts.shardings.get("generator", sampled.sharding))
        self._engine = Engine(sampled, section.batch, self._parts.max_length, self._stream.width)
        return self._steps()

    def _steps(self) -> Iterator[Step]:
        inputs, parts, setup, section = self.inputs, self._parts, self.setup, self.section
        with Ahead() as ahead:
            # With offloading, some arguments of the first call are in host memory.
            if parts.scores is not None and not parts.offload and parts.shardings is None:
                self._compile_ahead(ahead)
            start = (parts.reference or inputs.weights)()
            self.frozen = inputs.frozen()
            weights = None if parts.shardings is None else RoleWeights(parts.shardings, self.frozen)
            if weights is not None:
                start = weights.on("reference", start)
            reference = FrozenRole(start, "frozen" in parts.offload, self.frozen)
            del start  # The role holds the weights, possibly in host memory.
            sampler = make_sampler(parts.sampler or "local", self._engine, parts.sampler_name)
            make = Iteration if weights is None else functools.partial(
                PlacedIteration, weights=weights, times=recorded_in(inputs.loop.directory, parts.shardings)
            )
            self._iteration = iteration = make(
                setup, self._stream, sampler, self._engine.padding, parts.sampling, parts.reward(), parts.tokenizer,
                reference, self.frozen, "optimizer" in parts.offload, self._record, parts.stop, self._ahead_rollouts(),
                inputs.loop.stage,
            )
            alarms = None if parts.alarms is None else parts.alarms()

            def init() -> PPOState:
                with reference.on_device() as start:
                    start = start if parts.reference is None and weights is None else inputs.weights()
                    policy = with_value_head(setup, inputs.trained(start))
                    critic = None
                    if setup.owns_critic and parts.critic is not None:
                        critic = moved(parts.critic(), setup.critic.sharding)
                    elif setup.owns_critic:
                        key = jax.random.fold_in(inputs.root_key, streams.KEYS["ppo"]["critic"])
                        critic = critic_from(setup, start if weights is None else weights.on("critic", start), key)
                return iteration.offload_optimizer_state(init_ppo_state(setup, policy, critic, inputs.key))

            loop = dataclasses.replace(
                inputs.loop, total_steps=section.iterations, checkpoint_every=section.checkpoint_every,
                shown=("score", "kl_k1"), timeline=iteration.timeline, peak=peak_flops(setup.policy, parts.shardings),
                stop=None if alarms is None else lambda state, completed: alarms.ended(completed),
            )
            updates = section.iterations * section.epochs * section.minibatches
            warn_of_extent(inputs.loop.stage, schedule_warning(section.optimizer, updates),
                           rate_warning(section.optimizer, setup.policy, RL))
            abstract = iteration.offload_optimizer_state(abstract_ppo_state(setup))
            step = iteration if alarms is None else functools.partial(alarms.step, iteration)
            begin = loop.begin if self.stopping is None else functools.partial(self.stopping.begin, loop)
            self.training = begin(init, abstract, step)
            yield from self.training
            iteration.monitor.settle()
            if iteration.ahead is not None:
                iteration.ahead.close()
            if alarms is not None:
                alarms.settle()

    def _ahead_rollouts(self) -> AheadRollouts | None:
        """The store of rollouts that are sampled ahead; None if each is sampled with the newest weights."""
        if not self.section.sample_ahead:
            return None
        if hosts.count() > 1:
            raise UserError(f"config.ppo.sample_ahead is set, but this run has {hosts.count()} processes; it needs one, whose "
                            "devices can be divided: leave it at False")
        loop = self.inputs.loop
        folder = None if loop.directory is None else loop.directory / "ahead"
        return AheadRollouts(folder, self.section.checkpoint_every + 1, loop.stage)

    def _compile_ahead(self, ahead: Ahead) -> None:
        """Starts compiling the first iteration's programs."""
        parts, directory = self._parts, self.inputs.loop.directory
        checked = not self.section.checks.step_zero or (directory is not None and hosts.once((directory / CHECKS).exists))
        compile_ahead(
            ahead, self.setup, self._engine, parts.sampling, self._stream.at(0).ids, parts.scores,
            self.inputs.abstract_frozen, parts.abstract_start, checked,
        )

    def _trained_params(self, state: PPOState) -> Params:
        """The trained parameters without a value head."""
        return without_value_head(state.policy.params)

    def _as_reward(self, reward: Any, weights: Sequence[float] | None) -> Reward:
        """The reward, or the sum of a list of rewards with these weights."""
        clip, rewards = self.section.score_clip, list(reward) if isinstance(reward, (list, tuple)) else [reward]
        if clip is not None and not any(isinstance(one, RewardModel) for one in rewards):
            raise UserError(f"PPO(score_clip) is {clip}; only the scores of a RewardModel are clipped: leave it at None, or "
                            "clip within the reward")
        if not isinstance(reward, (list, tuple)):
            if weights is not None:
                raise UserError(f"PPO(reward_weights) is {weights!r}, but reward is not a list; give a list of rewards, or "
                                "leave the weights out")
            return self._one_reward(reward)
        weights = checked((1.0,) * len(rewards) if weights is None else weights, tuple[float, ...], "PPO(reward_weights)")
        if not rewards or len(weights) != len(rewards):
            raise UserError(f"PPO(reward) is a list of {len(rewards)} rewards with {len(weights)} weights; at least one "
                            "reward, and one weight for each, are expected")
        parts: dict[str, Reward] = {}
        for part in map(self._one_reward, rewards):
            same = sum(name == part.name or name.startswith(f"{part.name}-") for name in parts)
            parts[f"{part.name}-{same + 1}" if same else part.name] = part
        return sum_of_rewards(parts, weights)

    def _one_reward(self, reward: Any) -> Reward:
        if isinstance(reward, RewardModel):
            scorer, params = reward.scorer
            require_same_tokenizer(reward.tokenizer, self.tokenizer)
            scorer = dataclasses.replace(scorer, clip=self.section.score_clip)
            return LearntReward(scorer, FrozenRole(params), "reward model")
        return as_reward(reward, self.tokenizer, policy=self.inputs.model)

    def _reference_weights(self, reference: LanguageModel | None) -> Params | None:
        policy = self.inputs.language_model
        if reference is None:
            return None
        if not isinstance(reference, LanguageModel):
            raise UserError(f"PPO(reference) is of type {type(reference).__name__}; a LanguageModel is expected")
        if policy.model.lora is not None or reference.model != policy.model:
            raise UserError("PPO(reference) does not have the policy's architecture and mesh, or the policy has adapters, "
                            "which need the initial policy as the reference; leave the reference out, or load both with the "
                            "same options")
        return reference.weights

    def _critic_weights(self, model: RewardModel) -> Params:
        if not isinstance(model, RewardModel):
            raise UserError(f"PPO(start_critic) is of type {type(model).__name__}; a trained RewardModel is expected")
        scorer, params = model.scorer
        if not self.setup.owns_critic:
            raise UserError("PPO(start_critic) is given, but these settings have no separate critic: leave it out, or choose "
                            "advantages with a critic and critic='separate'")
        if scorer.ensemble is not None or scorer.model != self.setup.critic.on(self.setup.policy.sharding):
            raise UserError("PPO(start_critic) is an ensemble, or does not have the policy's architecture; train one "
                            "RewardModel from the policy's model")
        return strip_frozen(self.inputs.language_model.frozen, params)

    def _record(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)
        self._write_checks(checks)
