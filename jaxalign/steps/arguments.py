"""The arguments of the jitted training steps, one record per step.

The call, ahead-of-time compilation and the planner pass the same record; the latter two fill it with ShapeDtypeStructs instead
of arrays. Static fields are part of the pytree's structure, so they select the compiled program. A training step also takes
its state, whose buffers it donates: `step(state, arguments) -> (state, metrics)`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import optax

from jaxalign.config import DPOConfig
from jaxalign.models.model import Model, Params
from jaxalign.records import AnswerPairs, PackedBatch, PackedParts, PairBatch, ScoredPairs

static = functools.partial(dataclasses.field, metadata={"static": True})
"""A field of an argument record that selects the compiled program; its value must be hashable."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LmArguments:
    """Arguments of `lm_step.lm_step`.

    Attributes:
      model: a model with an LM head.
      optimizer: the optimizer of the trained parameters.
      batch: packed rows.
      frozen: the base under the adapters, or None.
      micro_batches: the number of micro-batches, which are computed one after another.
      balance_coef: the weight of the experts' load-balancing loss.
    """

    model: Model = static()
    optimizer: optax.GradientTransformation = static()
    batch: PackedBatch
    frozen: Params | None = None
    micro_batches: int = static(default=1)
    balance_coef: float = static(default=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceArguments:
    """Arguments of `preference_step.preference_step`.

    Attributes:
      model: a model with a scalar head.
      optimizer: the optimizer of the trained parameters.
      centering_coef: the weight of the squared sum of a pair's scores.
      batch: the pairs; its tokens are not read if `packed` is given.
      frozen: the base under the adapters, or None.
      packed: the pairs in micro-batches, from `packed.pack_pairs`; None for one micro-batch of all pairs.
    """

    model: Model = static()
    optimizer: optax.GradientTransformation = static()
    centering_coef: float = static()
    batch: PairBatch
    frozen: Params | None = None
    packed: PackedParts | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectArguments:
    """Arguments of `direct_step.direct_step`.

    Attributes:
      model: a model with an LM head.
      optimizer: the optimizer of the trained parameters.
      section: the objective and its options.
      batch: the pairs; its tokens are not read if `packed` is given.
      frozen: the base under the adapters, or None.
      packed: the pairs in micro-batches, from `packed.pack_pairs`; None for one micro-batch of all pairs.
    """

    model: Model = static()
    optimizer: optax.GradientTransformation = static()
    section: DPOConfig = static()
    batch: AnswerPairs
    frozen: Params | None = None
    packed: PackedParts | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobArguments:
    """Arguments of `direct_step.answer_logprobs`.

    Attributes:
      model: a model with an LM head.
      params: the parameters; with adapters, joined with the base.
      pairs: the answers; their tokens are not read if `packed` is given.
      packed: the pairs in micro-batches, from `packed.pack_pairs`; None gives each answer its own row.
    """

    model: Model = static()
    params: Params
    pairs: AnswerPairs
    packed: PackedParts | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillArguments:
    """Arguments of `preference_step.distill_step`.

    Attributes:
      model: the student, with a scalar head.
      optimizer: the optimizer of the student.
      objective: "regression", "pairs" or "both".
      scale: nats per unit of the normalised score.
      micro_batches: the number of micro-batches, which are computed one after another.
      batch: pairs with the teacher's scores.
    """

    model: Model = static()
    optimizer: optax.GradientTransformation = static()
    objective: str = static()
    scale: float = static()
    micro_batches: int = static(default=1)
    batch: ScoredPairs

