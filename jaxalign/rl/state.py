"""The training state of RL, and the setup that is fixed during a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.config import PPOConfig
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.rl.estimators import estimator_of
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.state import TrainState, abstract_state, init_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOState:
    """The state that changes during a run: one pytree, which checkpoints save and restore as a whole.

    Attributes:
      step: int32 [], the number of completed iterations, which is also the data cursor.
      policy: the policy's parameters and optimizer state.
      critic: a separate critic's parameters and optimizer state; else None.
      kl_coef: float32 [], the weight of the KL penalty.
    """

    step: jax.Array
    policy: TrainState
    critic: TrainState | None
    kl_coef: jax.Array


@dataclasses.dataclass(frozen=True)
class PPOSetup:
    """Everything that is fixed during a run. It is hashable, so it can be static for jit.

    Attributes:
      policy: a model with an LM head and, if the critic shares its trunk, also a scalar head.
      critic: a model with a scalar head; the same as `policy` if it shares the trunk.
      policy_optimizer, critic_optimizer: optax transformations, which compare by identity.
      config: the section `config.ppo`.
    """

    policy: Model
    critic: Model
    policy_optimizer: Any
    critic_optimizer: Any
    config: PPOConfig

    @property
    def critic_apart(self) -> bool:
        """Whether a separate critic has a mesh of its own."""
        return self.owns_critic and self.critic.sharding != self.policy.sharding

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator reads values."""
        return estimator_of(self.config).needs_critic

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head on the policy's trunk."""
        return self.has_critic and self.config.critic == "shared"

    @property
    def owns_critic(self) -> bool:
        """Whether there is a separate critic."""
        return self.has_critic and not self.shares_trunk

    @property
    def values_in_update(self) -> bool:
        """See `values_in_update`. A critic on a mesh of its own cannot run in the program that updates the policy."""
        return values_in_update(self.config) and not self.critic_apart

    @property
    def runs_critic(self) -> bool:
        """Whether values are computed before the update, together with the rollout's log-probabilities."""
        return self.has_critic and not self.values_in_update

    @property
    def reference(self) -> Model:
        """The policy's architecture without a value head."""
        return self.policy.with_head("lm")

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the policy loss runs the reference, because it needs more than the log-probabilities of sampled tokens."""
        return self.config.kl_in == "loss" and self.config.kl_estimator == "full"

    @property
    def recomputes(self) -> bool:
        """Whether the old log-probabilities are always the trainer's, because their ratio to the sampler's is needed."""
        return self.config.sampler_correction != "none" or estimator_of(self.config).needs_trainer_logprobs


def values_in_update(section: PPOConfig) -> bool:
    """Whether the update computes the critic's values and the advantages.

    With one update per rollout, the critic's forward pass in the update gives the values, which saves another pass. This
    requires an estimator that needs only rewards and values, and a separate critic: with a shared trunk, the same pass would
    already need the advantages.
    """
    once = section.epochs * section.minibatches == 1
    return once and section.critic == "separate" and estimator_of(section).values_suffice


def make_ppo_setup(section: PPOConfig, policy: Model, critic_sharding: Sharding | None = None) -> PPOSetup:
    """The setup of a run: models with their heads, and optimizers whose schedules span all updates.

    Args:
      section: `config.ppo`.
      policy: a model with an LM head.
      critic_sharding: the mesh of a separate critic; None: that of the policy.
    """
    updates = section.iterations * section.epochs * section.minibatches
    shared = section.critic == "shared" and estimator_of(section).needs_critic
    custom = section.advantages not in ADVANTAGES.builtin or section.policy_loss not in POLICY_LOSSES.builtin
    return PPOSetup(
        policy.with_head("lm_scalar") if shared else policy,
        policy.with_head("lm_scalar") if shared else policy.with_head("scalar").on(critic_sharding or policy.sharding),
        make_optimizer(section.optimizer, updates - section.critic_warmup * section.epochs * section.minibatches, custom),
        make_optimizer(section.critic_optimizer, updates, custom),
        section,
    )


def init_ppo_state(setup: PPOSetup, policy_params, critic_params, key: jax.Array) -> PPOState:
    """The state before the first iteration.

    Args:
      setup: models, optimizers and options.
      policy_params: the policy's trained parameters, from `with_value_head`. The first update donates them.
      critic_params: the trained parameters of a separate critic; ignored if there is none.
      key: the run's PRNG key, from which the keys of samples and shuffles are derived.
    """
    policy = init_state(setup.policy, setup.policy_optimizer, policy_params, key)
    coef = jax.device_put(jnp.float32(setup.config.kl_coef), setup.policy.sharding.replicated)
    critic = None
    if setup.owns_critic:
        critic = init_state(setup.critic, setup.critic_optimizer, critic_params, key)
        # Small arrays of equal value may share a buffer, and one buffer cannot be donated twice.
        critic = dataclasses.replace(critic, step=critic.step.copy(), key=critic.key.copy())
    return PPOState(policy.step.copy(), policy, critic, coef)


def abstract_ppo_state(setup: PPOSetup) -> PPOState:
    """ShapeDtypeStructs of `init_ppo_state`'s result."""
    policy = abstract_state(setup.policy, setup.policy_optimizer)
    critic = abstract_state(setup.critic, setup.critic_optimizer) if setup.owns_critic else None
    coef = jax.ShapeDtypeStruct((), jnp.float32, sharding=policy.step.sharding)
    return PPOState(policy.step, policy, critic, coef)


def with_value_head(setup: PPOSetup, params: Params) -> Params:
    """A policy's parameters. If the critic shares the trunk, a value head of zeros is added."""
    if not setup.shares_trunk:
        return params
    head = setup.policy.abstract()["score"]
    return params | {"score": jnp.zeros(head.shape, head.dtype, device=head.sharding)}


def without_value_head(params: Params) -> Params:
    """A policy's parameters without the value head."""
    return {name: value for name, value in params.items() if name != "score"}


def critic_from(setup: PPOSetup, start: Params, key: jax.Array) -> Params:
    """The initial parameters of a separate critic: the policy's trunk with a head of zeros, so that all values are 0.

    Args:
      setup: models, optimizers and options.
      start: the policy's starting parameters; with adapters, joined with the base.
      key: the PRNG key of new adapters.
    """
    if setup.critic.lora is not None:
        return setup.critic.init_adapters(start, key)
    critic = scalar_from_lm(start, setup.critic.init(key))
    return copy_params(critic | {"score": jnp.zeros_like(critic["score"])})
