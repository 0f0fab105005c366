"""What PPO trains and carries from one iteration to the next, and its shapes for a restore."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.config import Ppo
from jaxalign.models.model import Model
from jaxalign.parallel.rows import placed
from jaxalign.rl.estimators import estimator_of
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.state import TrainState, abstract_state, init_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PPOState:
    """step int32 []: iterations done (the data cursor); kl_coef float32 []; two TrainStates with their own optimizers.

    critic is None where the advantages need none, and where it is a head of the policy's.
    """

    step: jax.Array
    policy: TrainState
    critic: TrainState | None
    kl_coef: jax.Array


@dataclasses.dataclass(frozen=True)
class PPOSetup:
    """Everything fixed during a run, hashable, hence static for jit.

    policy has an LM head, critic a scalar head. Where the critic is shared both are the policy's trunk with both heads.
    """

    policy: Model
    critic: Model
    policy_optimizer: Any
    critic_optimizer: Any
    config: Ppo

    @property
    def has_critic(self) -> bool:
        return estimator_of(self.config).needs_critic

    @property
    def shares_trunk(self) -> bool:
        return self.has_critic and self.config.critic == "shared"

    @property
    def values_in_update(self) -> bool:
        """See `values_in_update`."""
        return values_in_update(self.config)

    @property
    def runs_critic(self) -> bool:
        """Whether a rollout's values are computed with its log-probs, before any update."""
        return self.has_critic and not self.values_in_update

    def critic_to_run(self, state: PPOState):
        """The parameters of a critic of its own, where it is run so; else None."""
        return None if state.critic is None or self.values_in_update else state.critic.params

    @property
    def reference(self) -> Model:
        """The policy's architecture without a value head."""
        return self.policy.with_head("lm")

    @property
    def loss_reads_reference(self) -> bool:
        """Whether the policy's loss runs the reference itself: its log-probs at the sampled tokens are not enough."""
        return self.config.kl_in == "loss" and self.config.kl_estimator == "full"

    @property
    def recomputes(self) -> bool:
        """Whether the old log-probs are always the trainer's, the sampler's being needed for a ratio between the two."""
        return self.config.sampler_correction != "none" or estimator_of(self.config).needs_trainer_logprobs


def values_in_update(section: Ppo) -> bool:
    """Whether the update makes the critic's values, and advantages of them, itself: with one update of a rollout they are those
    of the forward pass that the critic learns by, and it need not be run before. (A shared critic's trunk needs the advantages
    in that pass, and V-trace more than rewards and values.)"""
    once = section.epochs * section.minibatches == 1
    return once and section.critic == "separate" and estimator_of(section).values_suffice


def make_ppo_setup(section: Ppo, policy: Model) -> PPOSetup:
    """Models, and optimizers over all updates of the run."""
    updates = section.iterations * section.epochs * section.minibatches
    shared = section.critic == "shared" and estimator_of(section).needs_critic
    return PPOSetup(
        policy.with_head("lm_scalar") if shared else policy,
        policy.with_head("lm_scalar" if shared else "scalar"),
        make_optimizer(section.optimizer, updates - section.critic_warmup * section.epochs * section.minibatches),
        make_optimizer(section.critic_optimizer, updates),
        section,
    )


def init_ppo_state(setup: PPOSetup, policy_params, critic_params, key: jax.Array) -> PPOState:
    """The state before the first iteration; donates nothing, but its buffers may be donated later. critic_params are not
    read where there is no critic of its own; policy_params hold the value head where it is shared."""
    policy = init_state(setup.policy, setup.policy_optimizer, policy_params, key)
    coef = jnp.float32(setup.config.kl_coef)
    if setup.policy.sharding is not None:
        coef = jax.device_put(coef, setup.policy.sharding.replicated)
    critic = None
    if setup.has_critic and not setup.shares_trunk:
        critic = init_state(setup.critic, setup.critic_optimizer, critic_params, key)
        # Small arrays of equal value may share a buffer, and one buffer cannot be donated twice.
        critic = dataclasses.replace(critic, step=critic.step.copy(), key=critic.key.copy())
    return PPOState(policy.step.copy(), policy, critic, placed(coef, like=policy_params))


def abstract_ppo_state(setup: PPOSetup) -> PPOState:
    """ShapeDtypeStructs of `init_ppo_state`'s result."""
    policy = abstract_state(setup.policy, setup.policy_optimizer)
    own_critic = setup.has_critic and not setup.shares_trunk
    critic = abstract_state(setup.critic, setup.critic_optimizer) if own_critic else None
    coef = dict(sharding=policy.step.sharding) if setup.policy.sharding is not None else {}
    return PPOState(policy.step, policy, critic, jax.ShapeDtypeStruct((), jnp.float32, **coef))
