"""The state of a training run: one pytree, which checkpoints save and restore as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model
from jaxalign.steps.loss_scale import LossScale, first_scale
from jaxalign.steps.metrics import GradientMetrics
from jaxalign.steps.microbatch import Aux, Parts, accumulate


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of one trained model.

    Attributes:
      step: int32 [], the number of completed updates, which is also the data cursor.
      key: uint32 [2], the run's PRNG key. It never changes; steps fold their number into it.
      params: the trained parameters, sharded by the model's rules.
      opt_state: the optimizer's state, float32.
      loss_scale: the loss scale of a model that computes in float16; otherwise None.
    """

    step: jax.Array
    key: jax.Array
    params: Any
    opt_state: Any
    loss_scale: LossScale | None = None


def _parts(state: TrainState) -> list[tuple[jax.tree_util.GetAttrKey, Any]]:
    """The fields by name, without `loss_scale` if it is None, since checkpoints store parts by name."""
    names = [entry.name for entry in dataclasses.fields(state) if entry.name != "loss_scale" or state.loss_scale is not None]
    return [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in names]


jax.tree_util.register_pytree_with_keys(
    TrainState,
    lambda state: (_parts(state), None),
    lambda _, parts: TrainState(*parts),
    lambda state: ([part for _, part in _parts(state)], None),
)


def optimizer_shardings(model: Model, optimizer: optax.GradientTransformation):
    """The shardings of the optimizer state.

    Moments are sharded like their parameters, or over more axes, depending on `mesh.zero`. Counters and factored moments are
    small and replicated.
    """
    shapes, parts = model.abstract(), model.sharding.optimizer.tree(model.axes())
    own = {
        _names(path): (leaf.shape, part)
        for (path, leaf), part in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(parts), strict=True)
    }

    def place(path, leaf):
        names = _names(path)
        matches = [own[names[i:]] for i in range(len(names)) if names[i:] in own]
        return matches[0][1] if matches and matches[0][0] == leaf.shape else model.sharding.replicated

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, shapes))


def _names(path) -> tuple[str, ...]:
    """The dictionary keys in a leaf's path. In an optimizer's state they end with the keys of the leaf's parameter, if any."""
    return tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))


def init_state(model: Model, optimizer: optax.GradientTransformation, params, seed_key: jax.Array) -> TrainState:
    """A new state with `params`, on the devices of the model. The first step donates `params`."""
    params = jax.device_put(params, model.shardings())
    opt_state = jax.jit(optimizer.init, out_shardings=optimizer_shardings(model, optimizer))(params)
    small = jnp.zeros((), jnp.int32), jnp.copy(jax.random.key_data(seed_key)), first_scale(model)
    step, key, loss_scale = jax.device_put(small, model.sharding.replicated)
    return TrainState(step, key, params, opt_state, loss_scale)


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """ShapeDtypeStructs of the result of `init_state`, with shardings, for restoring a checkpoint."""
    opt_state = jax.eval_shape(optimizer.init, model.abstract())
    step, key = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    small = step, key, jax.eval_shape(lambda: first_scale(model))

    def with_sharding(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    step, key, loss_scale = jax.tree.map(lambda x: with_sharding(x, model.sharding.replicated), small)
    opt_state = jax.tree.map(with_sharding, opt_state, optimizer_shardings(model, optimizer))
    return TrainState(step, key, model.abstract(), opt_state, loss_scale)


def gradient_step(
    model: Model, optimizer, state: TrainState, loss_fn: Callable, parts: Parts, frozen=None,
    informative: jax.Array | None = None, first=(),
) -> tuple[TrainState, Aux, GradientMetrics]:
    """One update with the accumulated gradients of the micro-batches.

    Args:
      loss_fn, frozen: see `microbatch.accumulate`.
      parts: the micro-batches.
      first: arrays to wait for before `sharding.keep_gathered` gathers parameters.
      informative: see `apply_gradients`.

    Returns:
      (the new state, the combined `Aux` of the loss, the metrics of `apply_gradients`).
    """
    (loss, aux), gradients = accumulate(
        loss_fn, state.params, parts, model.constrain_gradients, state.loss_scale, frozen,
        lambda tree, part: model.in_use(tree, (first, part)),
    )

    def objective(params) -> jax.Array:
        """The batch's loss, estimated on the first micro-batch, for an optimizer that estimates curvature."""
        return parts.count * loss_fn(join(frozen, params), parts.of(0))[0]

    state, metrics = apply_gradients(model, state, gradients, optimizer, loss, objective, informative)
    return state, aux, metrics


def apply_gradients(
    model: Model, state: TrainState, gradients, optimizer, loss: jax.Array, objective: Callable | None = None,
    informative: jax.Array | None = None,
) -> tuple[TrainState, GradientMetrics]:
    """One update with the gradients of the whole batch.

    Non-finite gradients change only the step and the loss scale.

    Args:
      gradients: the result of `microbatch.accumulate`, which has divided out the loss scale.
      loss: float32 [], the loss of the batch.
      objective: the loss as a function of the parameters, for optimizers that estimate curvature.
      informative: bool [], False if no row counts, or if the gradients consist of rounding errors only, which Adam would scale
        to whole steps; then only the step and the loss scale change. None: True.

    Returns:
      (the new state, metrics). `overflowed` is that of `LossScale.explains`. Occasional overflows are expected, since the
      scale doubles until one occurs.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    # Each device updates the part whose moments it holds.
    axes, own_part = model.axes(), model.sharding.optimizer
    gradients, start = own_part.constrain_tree(gradients, axes), own_part.constrain_tree(state.params, axes)
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(gradients, state.opt_state, start, obj_fn=objective)
    params = optax.apply_updates(start, updates)

    changes = finite if informative is None else finite & informative

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(changes, n, o), new, old)

    # Two constraints, so that XLA gathers the selected parameters instead of both operands.
    params = model.sharding.constrain_tree(own_part.constrain_tree(keep(params, start), axes), axes)
    metrics, scale = GradientMetrics(grad_norm=norm, skipped=1.0 - finite.astype(jnp.float32)), state.loss_scale
    if scale is not None:
        overflowed = (~finite & scale.explains(loss)).astype(jnp.float32)
        metrics, scale = dataclasses.replace(metrics, loss_scale=scale.scale, overflowed=overflowed), scale.after(finite)
    return TrainState(state.step + 1, state.key, params, keep(opt_state, state.opt_state), scale), metrics
