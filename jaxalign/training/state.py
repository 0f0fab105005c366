"""The state of a training run: one pytree, saved and restored whole (Decision 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxalign.models.model import Model
from jaxalign.parallel.rows import placed
from jaxalign.training.loss_scale import LossScale, first_scale, scales_loss
from jaxalign.training.microbatch import Aux, Parts, accumulate


@dataclasses.dataclass(frozen=True)
class TrainState:
    """step int32 []: updates done, which is also the data cursor; key uint32 [2]: the run's PRNG key, never advanced,
    only folded with the step; params and opt_state: float32, sharded by the model's rules; loss_scale: of models that compute
    in float16, else None."""

    step: jax.Array
    key: jax.Array
    params: Any
    opt_state: Any
    loss_scale: LossScale | None = None


def _parts(state: TrainState) -> list[tuple[jax.tree_util.GetAttrKey, Any]]:
    """Without a loss scale a state has no such part, not even an empty one: checkpoints know the parts by name."""
    names = [entry.name for entry in dataclasses.fields(state) if entry.name != "loss_scale" or state.loss_scale is not None]
    return [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in names]


jax.tree_util.register_pytree_with_keys(
    TrainState, lambda state: (_parts(state), None), lambda _, parts: TrainState(*parts),
    lambda state: ([part for _, part in _parts(state)], None),
)  # fmt: skip


def optimizer_shardings(model: Model, optimizer: optax.GradientTransformation):
    """Shardings of the optimizer state: moments lie like their parameters, or more split (`mesh.zero`); counts and the sums of
    factored moments, which are small, are replicated. None on one device."""
    if model.sharding is None:
        return None
    shapes, parts = model.abstract(), model.sharding.optimizer.tree(model.axes())
    own = {
        _names(path): (leaf.shape, part)
        for (path, leaf), part in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(parts), strict=True)
    }

    def place(path, leaf):
        names = _names(path)
        found = [own[names[i:]] for i in range(len(names)) if names[i:] in own]
        return found[0][1] if found and found[0][0] == leaf.shape else model.sharding.replicated

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, shapes))


def _names(path) -> tuple[str, ...]:
    """The keys on the way to a leaf; of an optimizer's state they end with those of its parameter, where it has one."""
    return tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))


def init_state(model: Model, optimizer: optax.GradientTransformation, params, seed_key: jax.Array) -> TrainState:
    """A fresh state around `params` (which may be donated by the first step), placed."""
    opt_state = jax.jit(optimizer.init, out_shardings=optimizer_shardings(model, optimizer))(params)
    small = jnp.zeros((), jnp.int32), jax.random.key_data(seed_key), first_scale() if scales_loss(model) else None
    if model.sharding is not None:
        small = jax.device_put(small, model.sharding.replicated)
    step, key, loss_scale = small
    return placed(TrainState(step, key, params, opt_state, loss_scale))


def abstract_state(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """ShapeDtypeStructs (with shardings on a mesh) of `init_state`'s result: what a restore needs."""
    opt_state = jax.eval_shape(optimizer.init, model.abstract())
    step, key = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
    small = step, key, jax.eval_shape(first_scale) if scales_loss(model) else None
    if model.sharding is not None:
        here = model.sharding.replicated
        small = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), small)
        opt_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            opt_state,
            optimizer_shardings(model, optimizer),
        )
    step, key, loss_scale = small
    return TrainState(step, key, model.abstract(), opt_state, loss_scale)


def gradient_step(
    model: Model, optimizer, state: TrainState, loss_fn: Callable, parts: Parts
) -> tuple[TrainState, Aux, dict[str, jax.Array]]:
    """One update by the gradients of `loss_fn(params, part) -> (loss, Aux)` over micro-batches (`accumulate`): the new state,
    what the loss reports, and what `apply_gradients` does."""
    (loss, aux), gradients = accumulate(loss_fn, state.params, parts, model.constrain_gradients, state.loss_scale)

    def objective(params) -> jax.Array:
        """The loss, by its first micro-batch: what an optimizer that looks at its curvature asks for."""
        return parts.count * loss_fn(params, parts.of(0))[0]

    state, metrics = apply_gradients(model, state, gradients, optimizer, loss, objective)
    return state, aux, metrics


def apply_gradients(
    model: Model, state: TrainState, gradients, optimizer, loss: jax.Array, objective: Callable | None = None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update, of gradients as `accumulate` gives them with this state's loss scale; loss: what it gives beside; objective:
    the loss of parameters, for optimizers that need its curvature.

    Gradients that are not finite change nothing but the step and the loss scale, and are counted in `skipped`. With a loss
    scale `loss_scale` is the one that this step used, and `overflowed` counts of those skipped the ones that it may be to blame
    for (`LossScale.explains`): now and then one is how the scale finds its level, and no fault of the run's.
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    start = state.params
    if model.sharding is not None:  # Each device updates the part whose moments it has.
        parts = model.sharding.optimizer.tree(model.axes())
        gradients, start = jax.lax.with_sharding_constraint((gradients, start), (parts, parts))
    update = optax.with_extra_args_support(optimizer).update
    updates, opt_state = update(gradients, state.opt_state, start, obj_fn=objective)
    params = optax.apply_updates(start, updates)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
    params = keep(params, start)
    if model.sharding is not None:  # Twice: else what is chosen from is gathered, and not the choice.
        params = jax.lax.with_sharding_constraint(params, parts)
        params = jax.lax.with_sharding_constraint(params, model.shardings())
    metrics, scale = {"grad_norm": norm, "skipped": 1.0 - finite.astype(jnp.float32)}, state.loss_scale
    if scale is not None:
        metrics |= {"loss_scale": scale.scale, "overflowed": (~finite & scale.explains(loss)).astype(jnp.float32)}
    scale = None if scale is None else scale.after(finite)
    return TrainState(state.step + 1, state.key, params, keep(opt_state, state.opt_state), scale), metrics
