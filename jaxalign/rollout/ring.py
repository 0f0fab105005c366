"""A cache as a ring that rows enter and leave: prompts are written into it, and it is cut to what lives.

Pure functions; the host decides (`session.py`). On a mesh each device changes its own rows: a prompt is prefilled on the
devices that have the slot it enters, so nothing is sent. parts: how many parts the mesh splits rows into.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxalign.models.cache import CACHE_AXES, ROW_AXIS, SLOT_AXES, Cache, Caches
from jaxalign.models.model import Model
from jaxalign.parallel.manual import on_each_device


@functools.partial(jax.jit, static_argnames="model")
def prefill(model: Model, params, prompts) -> Caches:
    """Keys and values of prompts int32 [R, P], right-padded: token i in slot i. model: as it samples (`Model.generation`)."""
    return model.prefill(params, prompts)[1]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def insert(model: Model, cache: Caches, prompts: Caches, plan, slot) -> Caches:
    """The ring with prompts in some of its rows, their last tokens in the slot before `slot`, where all rows write next.

    prompts: as `prefill` gives them. plan int32 [parts, n, 3]: for each part of the rows, (row, which of its prompts, how many
    tokens of it) n times; a row of -1 ends the list. What stood in such a row before is gone.
    """
    return _by_part(model, _insert, (cache, prompts), plan, slot)


@functools.partial(jax.jit, static_argnames=("model", "slots"))
def reroll(model: Model, cache: Caches, index, slot, slots: int) -> Caches:
    """A ring of `slots` slots whose next one is 0, with the latest tokens of some of its rows. index int32 [parts, n]: which
    rows of each part become the new ones."""
    return _by_part(model, functools.partial(_reroll, slots=slots), (cache,), index, slot)


def _by_part(model: Model, fn, caches: tuple[Caches, ...], plan, slot) -> Caches:
    """fn(*caches, plan [n, ...], slot) of each part of the rows."""
    if model.sharding is None:
        return fn(*caches, plan[0], slot)
    names = lambda cache: Cache(  # noqa: E731
        *(None if x is None else model.sharding.spec(axes) for x, axes in zip(cache, CACHE_AXES, strict=True))
    )
    own = model.sharding.spec(("batch",) + (None,) * (plan.ndim - 1))
    specs = (*(tuple(map(names, layers)) for layers in caches), own, PartitionSpec())
    return on_each_device(model.sharding, lambda *x: fn(*x[:-2], x[-2][0], x[-1]), specs, specs[0])(*caches, plan, slot)


def _map(fn, *caches: Caches) -> Caches:
    """fn(*leaves, axis of the slots) of each leaf."""
    def one(*layers: Cache) -> Cache:
        return Cache(*(None if x[0] is None else fn(*x) for x in zip(*layers, SLOT_AXES, strict=True)))

    return tuple(map(one, *caches))


def _insert(cache: Caches, prompts: Caches, plan_nx3, slot) -> Caches:
    S = cache[0].values.shape[SLOT_AXES.values]

    def enter(i, cache: Caches) -> Caches:
        row, source, length = plan_nx3[i]

        def one(whole, part, axis: int):
            tokens = jax.lax.slice_in_dim(part, 0, min(S, part.shape[axis]), axis=axis)
            tokens = jax.lax.dynamic_slice_in_dim(tokens, source, 1, ROW_AXIS)
            room = [(0, S - tokens.shape[axis]) if a == axis else (0, 0) for a in range(tokens.ndim)]
            # What pads a prompt comes to lie before it, where the row does not look.
            return jax.lax.dynamic_update_slice_in_dim(
                whole, jnp.roll(jnp.pad(tokens, room), slot - length, axis), row, ROW_AXIS
            )

        return _map(one, cache, prompts)

    return jax.lax.fori_loop(0, jnp.sum(plan_nx3[:, 0] >= 0), enter, cache)


def _reroll(cache: Caches, index_n, slot, slots: int) -> Caches:
    def one(whole, axis: int):
        S = whole.shape[axis]
        rows = jnp.roll(jnp.take(whole, index_n, axis=ROW_AXIS), -slot, axis)
        if slots <= S:
            return jax.lax.slice_in_dim(rows, S - slots, S, axis=axis)
        return jnp.pad(rows, [(slots - S, 0) if a == axis else (0, 0) for a in range(rows.ndim)])

    return _map(one, cache)
