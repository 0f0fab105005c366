"""The public trainer for RL: PPO and its variants."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxalign import streams
from jaxalign.config import Ppo
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import apart
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Params
from jaxalign.parallel import hosts
from jaxalign.records import Prompt
from jaxalign.rewards.base import Reward
from jaxalign.rewards.checked import as_reward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rl.checks import Check
from jaxalign.rl.prompts import PromptStream
from jaxalign.rl.state import critic_from, make_ppo_setup
from jaxalign.rollout.sampling import section_sampling
from jaxalign.storage import write_atomically
from jaxalign.trainers.base import PolicyTrainer, Step, section_from
from jaxalign.trainers.reinforcement import Reinforcement, Roles
from jaxalign.trainers.reward_model import RewardModel
from jaxalign.trainers.rows import as_prompts
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.offload import FrozenRole


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
        the name of a verifier, or "package.module:name" or "FILE.py:name" for one of these.
      reference: the model that the KL is measured against, of the policy's architecture; None for the initial policy.
      start_critic: a trained `RewardModel` whose weights the critic starts from; None for the policy's trunk with a zero value
        head.
      sampler: samples the responses: a registered name, "package.module:name", "FILE.py:name", a
        `jaxalign.rollout.sampler.Sampler`, or a function that takes an engine and returns one; None for this process's engine.
      directory: for metrics, checkpoints, the step-0 checks and exact resume; None keeps everything in memory.
      seed: seeds the samples and the order of the prompts.
      trackers: receive the metrics of every step.
      progress: show progress on stderr.
      fields: fields of the config section `ppo`, such as iterations, batch, advantages, policy_loss and kl_coef.

    Attributes:
      checks: the step-0 checks; empty until they have run.

    Raises:
      UserError: an argument is not a field of the section, has a value that the section does not accept, or has the wrong type.
    """

    def __init__(
        self, policy: LanguageModel, reward: Any, *, reference: LanguageModel | None = None,
        start_critic: RewardModel | None = None, sampler: Any = None, directory=None, seed=0, trackers=(),
        progress=False, **fields: Any,
    ):
        if "prompts" in fields:
            raise UserError("PPO(prompts) is not an argument; pass the prompts to PPO.fit(prompts)")
        section = section_from(Ppo(), fields, "PPO")
        if section.alarms.every or section.helpful_share is not None:
            name = "alarms" if section.alarms.every else "helpful_share"
            raise UserError(f"PPO({name}) is not an argument; only stage ppo of a run has helpful prompts to read: measure the "
                            "policy between the steps of PPO.fit, and mix the prompts before it")
        options = {"directory": directory, "seed": seed, "trackers": trackers, "progress": progress}
        super().__init__(policy, section, "PPO", **options)
        self._setup = make_ppo_setup(section, policy.model)
        self._reward, self._sampler, self.checks = self._as_reward(reward), sampler, ()
        self._reference, self._start_critic = self._as_reference(reference), start_critic
        if start_critic is not None:
            self._critic_weights(start_critic)  # Raises an error for an unsuitable critic before anything runs.

    def fit(self, prompts: Any) -> Iterator[Step]:
        """Trains on prompts and yields each iteration.

        Args:
          prompts: a list of texts, of message lists, or of {"prompt": either, ...} whose other entries are columns for the
            reward; or a mapping of columns. Prompts are shuffled in each epoch. If there are fewer than an iteration needs,
            they repeat within it.

        Raises:
          UserError: there are no prompts, a prompt is malformed or too long, or their columns differ.
        """
        asked = as_prompts(prompts, "PPO.fit(prompts)")
        _require_equal_columns(asked)
        policy, section = self._start, self.section
        ids = [policy.prompt_ids(prompt) for prompt in asked]
        stream = PromptStream(asked, ids, section.batch, section.group_size, self._seed, streams.LOADERS["ppo"])
        sampling = section_sampling(section, policy.stop_ids)
        run = Reinforcement(self._setup, stream, sampling, policy.tokenizer, policy.max_length)
        run.engine.pad(ids, section.max_new_tokens)  # Raises an error for prompts that are too long before anything runs.
        self._claim(ids)
        self._fit = run
        roles = Roles(self._reward, self._reference, self._trained_from, self._critic_from, policy.frozen)
        return run.steps(roles, self._loop, self._key(streams.STATE), self._sampler, on_checks=self._record)

    def _key(self, use: int) -> jax.Array:
        """The key that stage ppo uses, so that a stage and a trainer with the same seed draw the same random numbers."""
        stage = jax.random.fold_in(jax.random.key(self._seed), streams.STAGES["ppo"])
        return jax.random.fold_in(stage, use)

    def _as_reward(self, reward: Any) -> Reward:
        if isinstance(reward, RewardModel):
            scorer, params = reward.scorer
            self._require_tokenizer(reward, "reward")
            scorer = dataclasses.replace(scorer, clip=self.section.score_clip)
            return LearntReward(scorer, FrozenRole(params), "reward model")
        if self.section.score_clip is not None:
            raise UserError(f"PPO(score_clip) is {self.section.score_clip}; only the scores of a RewardModel are clipped: "
                            "leave it at None, or clip within the reward")
        return as_reward(reward, self._start.tokenizer)

    def _as_reference(self, reference: LanguageModel | None) -> FrozenRole:
        policy = self._start
        if reference is None:
            return FrozenRole(policy.weights)
        if not isinstance(reference, LanguageModel):
            raise UserError(f"PPO(reference) is of type {type(reference).__name__}; a LanguageModel is expected")
        if policy.model.lora is not None or reference.model != policy.model:
            raise UserError("PPO(reference) does not have the policy's architecture and mesh, or the policy has adapters, "
                            "which need the initial policy as the reference; leave the reference out, or load both with the "
                            "same options")
        return FrozenRole(reference.weights)

    def _trained_from(self, start: Params) -> Params:
        del start  # These are the reference's weights, which differ from the policy's if a reference was given.
        return copy_params(self._start.params)

    def _critic_from(self, start: Params) -> Params:
        if self._start_critic is not None:
            return copy_params(self._critic_weights(self._start_critic))
        return critic_from(self._setup, self._start.weights, self._key(streams.KEYS["ppo"]["critic"]))

    def _critic_weights(self, model: RewardModel) -> Params:
        if not isinstance(model, RewardModel):
            raise UserError(f"PPO(start_critic) is of type {type(model).__name__}; a trained RewardModel is expected")
        scorer, params = model.scorer
        if not self._setup.owns_critic:
            raise UserError("PPO(start_critic) is given, but these settings have no separate critic: leave it out, or choose "
                            "advantages with a critic and critic='separate'")
        if scorer.ensemble is not None or scorer.model != self._setup.critic:
            raise UserError("PPO(start_critic) is an ensemble, or does not have the policy's architecture; train one "
                            "RewardModel from the policy's model")
        return apart(self._start.frozen, params)

    def _require_tokenizer(self, model: RewardModel, name: str) -> None:
        if model.tokenizer.vocab_size != self._start.tokenizer.vocab_size:
            raise UserError(f"PPO({name}) has a tokenizer of {model.tokenizer.vocab_size} ids and the policy's has "
                            f"{self._start.tokenizer.vocab_size}; a RewardModel with the policy's tokenizer is expected")

    def _record(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)
        if self._directory is not None:
            text = json.dumps([dataclasses.asdict(check) for check in checks], indent=2) + "\n"
            hosts.once(lambda: write_atomically(self._directory / "checks.json", text))

    def _trained(self) -> Params:
        params = self._fit.policy_params if self.state is not None else None
        return copy_params(params) if self._fit.training.running else params


def _require_equal_columns(prompts: Sequence[Prompt]) -> None:
    """Raises UserError if a prompt has other columns than the first prompt."""
    names = set(prompts[0].columns)
    for number, prompt in enumerate(prompts):
        if set(prompt.columns) != names:
            differing = ", ".join(sorted(names ^ set(prompt.columns)))
            raise UserError(f"PPO.fit(prompts)[{number}] and the first prompt do not have the same columns ({differing}); give "
                            "all prompts the same columns")


