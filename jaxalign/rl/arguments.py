"""The arguments of RL's jitted steps, one record per step.

The call, ahead-of-time compilation and the planner pass the same record; the latter two fill it with ShapeDtypeStructs instead
of arrays. Static fields are part of the pytree's structure, so they select the compiled program. Parameters do not include the
frozen base under adapters, which is passed once, as `frozen`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxalign.models.model import Model, Params
from jaxalign.records import Experience, PackedParts, Rollout
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl.state import PPOSetup

static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperienceArguments:
    """Arguments of `experience.packed_experience`, for a rollout of B responses of N tokens.

    Attributes:
      setup: models, optimizers and options.
      recompute: use the trainer's log-probabilities as the old ones instead of the sampler's.
      scorer: a reward model to run in the same program; None if `scores` are given.
      reference_params, policy_params: the parameters, without `frozen`.
      critic_params: the critic's parameters; None without a critic, if it shares the policy's trunk, or if it runs in the
        update.
      scorer_params: the weights of `scorer`, or None.
      frozen: the base that models with adapters share, or None.
      kl_coef: float32 [].
      rollout: the sampled responses.
      parts: the responses packed into micro-batches.
      scores: float32 [B], or [B, N] for a score per token; None with a `scorer`.
      kept: bool [B], False for rows whose score was dropped; None: all rows have a score.
      baseline: float32 [B], rewards of greedy responses, or None.
    """

    setup: PPOSetup = static()
    recompute: bool = static()
    scorer: Scorer | None = static()
    reference_params: Params
    policy_params: Params
    critic_params: Params | None
    scorer_params: Params | None
    frozen: Params | None
    kl_coef: Any
    rollout: Rollout
    parts: PackedParts
    scores: Any
    kept: Any
    baseline: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputArguments:
    """Arguments of `experience.experience_of`, on the mesh of the policy.

    Attributes:
      setup: models, optimizers and options.
      outputs: float32 [B, N] each, by name: the log-probabilities of the "reference", the "values" of a critic that does not
        run in the update, and the policy's "logprobs" if they replace those of the sampler.
      scores: float32 [B], or [B, N] for a score per token.
      kl_coef, rollout, kept, baseline: as in `ExperienceArguments`.
    """

    setup: PPOSetup = static()
    outputs: dict[str, Any]
    kl_coef: Any
    rollout: Rollout
    scores: Any
    kept: Any
    baseline: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleArguments:
    """Arguments of `checks.sampler_difference` and of the programs of one role in `role_programs`, all on its mesh.

    Attributes:
      model: the role's model.
      temperature: the sampling temperature, by which logits are divided.
      params: its joined parameters.
      rollout: the sampled responses.
      parts: the responses packed into micro-batches for this mesh.
    """

    model: Model = static()
    temperature: float = static()
    params: Params
    rollout: Rollout
    parts: PackedParts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticArguments:
    """Arguments of `placed_update.critic_epochs` other than the critic's state, all on the critic's mesh.

    Attributes:
      setup: models, optimizers and options.
      batch, order, packed, frozen: as in `UpdateArguments`.
      ran: float32 [epochs * minibatches], 1 for the minibatches on which the policy was updated.
    """

    setup: PPOSetup = static()
    batch: Experience
    order: Any
    packed: PackedParts
    ran: Any
    frozen: Params | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepZeroArguments:
    """Arguments of `step_zero.step_zero_values`.

    Attributes:
      setup: models, optimizers and options.
      params: the policy's parameters, without `frozen`.
      frozen, reference_params: as in `ExperienceArguments`.
      experience: the experience, whose rollout has the old log-probabilities in use.
      kl_coef: float32 [].
      parts: all rows of the experience in parts, as in scoring.
      packed: the first rows of the experience in micro-batches, on which KL and gradients are checked.
      sampled: float32 [B, N], the sampler's own log-probabilities.
    """

    setup: PPOSetup = static()
    params: Params
    frozen: Params | None
    reference_params: Params
    experience: Experience
    kl_coef: Any
    parts: PackedParts
    packed: PackedParts
    sampled: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateArguments:
    """Arguments of `update.packed_update` other than the state, which is donated.

    Attributes:
      setup: models, optimizers and options.
      batch: the experience to train on, B rows.
      order: int32 [epochs * minibatches, B / minibatches], the rows of each minibatch.
      packed: the rows of each minibatch in micro-batches.
      frozen: the base that models with adapters share, or None.
      reference_params: the reference's parameters, without `frozen`, if `setup.loss_reads_reference`; else None.
    """

    setup: PPOSetup = static()
    batch: Experience
    order: Any
    packed: PackedParts
    frozen: Params | None = None
    reference_params: Params | None = None
