"""Operations on the cache rings of continuous batching (`layouts.Layout`): inserting rows, swapping tiers, resizing,
and decoding in chunks: several steps of all rows in one program, which stops early once enough rows have ended.

These are pure functions; the host makes the decisions (`session.py`). `slot` is the slot of the longest ring that all rows
write next; a shorter ring uses it modulo its number of slots. On a mesh each device changes only its own rows: a prompt is
prefilled on the devices that hold the row it enters, so nothing is communicated. parts: the number of parts into which the mesh
splits rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxalign.models.cache import CACHE_AXES, ROW_AXIS, SLOT_AXES, Cache, Caches, Tiers
from jaxalign.models.heads import lm_logits
from jaxalign.models.model import Model
from jaxalign.models.unstacked import has_quantised_layers, unstacks
from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.mesh_program import IN_ONE_PART, MeshProgram, supports
from jaxalign.rollout.layouts import Layout
from jaxalign.rollout.sampling import Variant, sample, unpack

NOTHING, NOT_FINITE = -1, -2
"""Markers in place of a token: the row generated none; the row ended because its logits were not all finite."""
_Program = functools.partial(MeshProgram, overlap=False, on_cpus=IN_ONE_PART)


@functools.partial(_Program, static_argnames="model")
def prefill(model: Model, params, prompts) -> Caches:
    """Keys and values of right-padded prompts int32 [R, P]: token i in slot i. model: with the rules of `Model.generation`."""
    chex.assert_rank(prompts, 2)
    return model.prefill(params, prompts)[1]


@functools.partial(_Program, static_argnames="model")
def prefill_after(model: Model, params, prefixes, counts, rest) -> Caches:
    """`prefill` of prompts that share prefixes: their keys and values, token i in slot i. See `Model.prefill_after`."""
    return model.prefill_after(params, prefixes, counts, rest)


@functools.partial(_Program, static_argnames="model", donate_argnames="tiers")
def insert(model: Model, tiers: Tiers, prompts: Caches, plan, slot) -> Tiers:
    """Writes prompts into rows of the rings, with their last tokens in the slot before `slot`. Overwrites these rows.

    prompts: the result of `prefill`. plan int32 [parts, tiers, n, 3]: n entries (row of the tier, index of the part's prompt,
    number of its tokens) for each part and tier; a row of -1 ends the list.
    """
    chex.assert_shape(plan, (None, len(tiers), None, 3))
    return _by_part(model, _enter, (tiers, prompts), plan, slot)


@functools.partial(_Program, static_argnames="model", donate_argnames="tiers")
def exchange(model: Model, tiers: Tiers, plan, slot) -> Tiers:
    """Swaps rows between two tiers. plan int32 [parts, n, 2]: n entries (row of the short tier, row of the long tier) for each
    part; a row of -1 ends the list. A row from the long tier keeps only its latest tokens, as many as the short tier has slots.
    """
    chex.assert_shape(plan, (None, None, 2))
    return _by_part(model, _exchange, (tiers,), plan, slot)


@functools.partial(_Program, static_argnames=("model", "layout"))
def reroll(model: Model, tiers: Tiers, index, slot, layout: Layout) -> Tiers:
    """Moves rows to rings of another layout, keeping their latest tokens; the next slot is then 0. index int32 [parts, n]: the
    old row of each new row of a part, both counted through the tiers."""
    return _by_part(model, functools.partial(_reroll, layout=layout), (tiers,), index, slot, len(layout.rows))


def _by_part(model: Model, fn, caches: tuple, plan, slot, tiers: int | None = None) -> Tiers:
    """Applies fn(*caches, plan [n, ...], slot) to each part of the rows. tiers: the number of tiers of the result, if it
    differs from that of `caches[0]`."""

    def names(cache: Cache) -> Cache:
        return Cache(*(None if x is None else model.sharding.spec(axes) for x, axes in zip(cache, CACHE_AXES, strict=True)))

    plan_spec = model.sharding.spec(("batch",) + (None,) * (plan.ndim - 1))
    cache_specs = jax.tree.map(names, caches, is_leaf=lambda x: isinstance(x, Cache))
    result_specs = cache_specs[0] if tiers is None else cache_specs[0][:1] * tiers
    specs = (*cache_specs, plan_spec, PartitionSpec())
    return on_each_device(model.sharding, lambda *x: fn(*x[:-2], x[-2][0], x[-1]), specs, result_specs)(*caches, plan, slot)


def _map(fn, *caches: Caches) -> Caches:
    """Applies fn(*leaves, axis of the slots) to each leaf."""
    def one(*layers: Cache) -> Cache:
        return Cache(*(None if x[0] is None else fn(*x) for x in zip(*layers, SLOT_AXES, strict=True)))

    return tuple(map(one, *caches))


def _enter(tiers: Tiers, prompts: Caches, plan_txnx3, slot) -> Tiers:
    def enter(plan_nx3, i, cache: Caches) -> Caches:
        S = cache[0].values.shape[SLOT_AXES.values]
        row, source, length = plan_nx3[i]

        def one(whole, part, axis: int):
            tokens = jax.lax.slice_in_dim(part, 0, min(S, part.shape[axis]), axis=axis)
            tokens = jax.lax.dynamic_slice_in_dim(tokens, source, 1, ROW_AXIS)
            room = [(0, S - tokens.shape[axis]) if a == axis else (0, 0) for a in range(tokens.ndim)]
            # A prompt's padding wraps around to the slots before the prompt, which the row never reads.
            return jax.lax.dynamic_update_slice_in_dim(
                whole, jnp.roll(jnp.pad(tokens, room), slot % S - length, axis), row, ROW_AXIS
            )

        return _map(one, cache, prompts)

    return tuple(
        jax.lax.fori_loop(0, jnp.sum(plan_nx3[:, 0] >= 0), functools.partial(enter, plan_nx3), cache)
        for cache, plan_nx3 in zip(tiers, plan_txnx3, strict=True)
    )


def _exchange(tiers: Tiers, plan_nx2, slot) -> Tiers:
    half = tiers[0][0].values.shape[SLOT_AXES.values]
    # Slot s of the short ring takes the newer of the long ring's slots s and s + half.
    later = jnp.where(slot < half, jnp.arange(half) >= slot, jnp.arange(half) < slot - half)

    def read(tiers: Tiers, row, other) -> Tiers:
        """The new contents of the two rows."""
        def one(short, long, axis: int):
            own = jax.lax.dynamic_slice_in_dim(short, row, 1, ROW_AXIS)
            first, second = jnp.split(jax.lax.dynamic_slice_in_dim(long, other, 1, ROW_AXIS), 2, axis=axis)
            latest = jnp.where(later.reshape([half if a == axis else 1 for a in range(short.ndim)]), second, first)
            # Copy to both halves: in one of them a token has its true age, in the other it is too old to be read.
            return latest, jnp.concatenate([own, own], axis=axis)

        pairs = _map(one, *tiers)
        return tuple(tuple(Cache(*(x and x[tier] for x in cache)) for cache in pairs) for tier in range(2))

    def swap(i, carried: tuple[Tiers, Tiers]) -> tuple[Tiers, Tiers]:
        tiers, rows = carried

        def written(at, tier: Caches, row: Caches) -> Caches:
            return _map(lambda x, own, axis: jax.lax.dynamic_update_slice_in_dim(x, own, at, ROW_AXIS), tier, row)

        tiers = tuple(written(*both) for both in zip(plan_nx2[i], tiers, rows, strict=True))
        # Read the next rows after writing these: if the loop body read before it wrote, XLA would copy whole rings.
        return tiers, read(tiers, *plan_nx2[jnp.minimum(i + 1, len(plan_nx2) - 1)])

    return jax.lax.fori_loop(0, jnp.sum(plan_nx2[:, 0] >= 0), swap, (tiers, read(tiers, *plan_nx2[0])))[0]


def _reroll(tiers: Tiers, index_n, slot, layout: Layout) -> Tiers:
    resized, begin = [], 0
    for rows, slots in zip(*layout, strict=True):
        index = index_n[begin : begin + rows]
        begin += rows

        def one(*leaves, index=index, slots=slots):
            *wholes, axis = leaves

            def layer(wholes):
                rings = [_latest(whole, slot, slots, axis - 1) for whole in wholes]
                return jnp.take(jnp.concatenate(rings, axis=ROW_AXIS - 1), index, axis=ROW_AXIS - 1)

            return jax.lax.map(layer, tuple(wholes))  # All layers at once would need copies of the whole ring.

        resized.append(_map(one, *tiers))
    return tuple(resized)


def _latest(ring, slot, slots: int, axis: int):
    """The last `slots` slots before `slot`, in their order."""
    S = ring.shape[axis]
    rows = jnp.roll(ring, -(slot % S), axis)
    if slots <= S:
        return jax.lax.slice_in_dim(rows, S - slots, S, axis=axis)
    return jnp.pad(rows, [(slots - S, 0) if a == axis else (0, 0) for a in range(rows.ndim)])


class Drawn(NamedTuple):
    """tokens int32 [C, B]; logprobs float32 [C, B], valid at tokens; steps int32 []: the number of the C steps that ran."""

    tokens: jax.Array
    logprobs: jax.Array
    steps: jax.Array


class _Loop(NamedTuple):
    t: jax.Array
    token: jax.Array
    left: jax.Array
    drawn: tuple[jax.Array, jax.Array]
    tiers: Tiers


_JIT = {"static_argnames": ("model", "variant", "steps"), "donate_argnames": "tiers"}


@functools.partial(_Program, **_JIT)
def decode_chunk(
    model: Model, params, tiers: Tiers, rows, control, variant: Variant, steps: int
) -> tuple[Tiers, Drawn]:
    """Decodes up to `steps` tokens per row. model, params: as from `Model.generation` and `Model.for_generation`.

    rows int32 [4 + F, B]: the last token, its position, the number of tokens that may follow (0: the row is free), the row's
    global number, and its settings (`sampling.unpack`). control int32 [3]: the slot of the longest ring to write first, the
    maximum number of steps, and the number of ended rows after which to stop. variant: the parts that the rows' settings need.
    """
    chex.assert_shape([rows, control], [(None, None), (3,)])
    token, position, left, numbers = rows[:4]
    settings = unpack(rows[4:], variant.key_impl)
    keys = jax.vmap(jax.random.fold_in)(settings.keys, numbers)
    unembedding = model.unembedding(params).astype(model.config.compute_dtype)
    S, live = tiers[-1][0].values.shape[3], jnp.sum(left > 0)
    decoding = model.decoding(params)

    def goes_on(loop: _Loop):
        now = jnp.sum(loop.left > 0)
        return (loop.t < control[1]) & (live - now < control[2]) & (now > 0)

    def step(loop: _Loop) -> _Loop:
        at = position + loop.t
        hidden, tiers = decoding.step(loop.token, at, loop.tiers, (control[0] + loop.t) % S)
        token, logprob = sample(lm_logits(hidden, unembedding, model.config.final_softcap), keys, at + 1, settings, variant)
        stopped = jnp.any(token[None] == settings.stop_ids, axis=0)
        finite, writes = jnp.isfinite(logprob), loop.left > 0
        tokens = jnp.where(writes, jnp.where(finite, token, NOT_FINITE), NOTHING)
        columns = tokens, jnp.where(writes & finite, logprob, 0.0)
        drawn = tuple(
            jax.lax.dynamic_update_slice(whole, column[None], (loop.t, jnp.int32(0)))
            for whole, column in zip(loop.drawn, columns, strict=True)
        )
        left = jnp.where(stopped | ~finite, 0, jnp.maximum(loop.left - 1, 0))
        return _Loop(loop.t + 1, jnp.maximum(tokens, 0), left, drawn, tiers)

    B = len(token)
    drawn = jnp.full((steps, B), NOTHING, jnp.int32), jnp.zeros((steps, B), jnp.float32)
    end = jax.lax.while_loop(goes_on, step, _Loop(jnp.int32(0), token, left, drawn, decoding.begin(tiers)))
    # Replicated on every device, so that every process can read them.
    return decoding.end(end.tiers), Drawn(*(model.sharding.constrain(x, (None,) * x.ndim) for x in (*end.drawn, end.t)))


GPU_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Compiler options of decoding on GPUs: do not merge products of the same rows, such as an MLP's first two. To merge them, the
compiler would copy their weights in every step to concatenate them."""
IN_PLACE = GPU_OPTIONS | ({"xla_gpu_enable_triton_gemm": False} if jax.__version_info__ >= (0, 11) else {})
"""The options if the layers are unrolled and stay in their stacks (`models.unstacked`). In JAX 0.11.2 cuBLAS reads them there,
and Triton's kernels get copies. In JAX 0.10.2, compiled without a GPU, cuBLAS gets copies, and Triton's kernels read most of
them in place."""
decode_chunk_on_gpus = jax.jit(decode_chunk.__wrapped__, **_JIT, compiler_options=GPU_OPTIONS)
decode_chunk_in_place = jax.jit(decode_chunk.__wrapped__, **_JIT, compiler_options=IN_PLACE)
DECODING = (decode_chunk, decode_chunk_on_gpus, decode_chunk_in_place)


def decoding_options(model: Model, params) -> dict[str, Any] | None:
    """The compiler options of `decode_program`. Quantised layers in their stacks have `GPU_OPTIONS`; neither has been timed."""
    if model.sharding.platform != "gpu":
        return None
    in_stacks = model.layered and not has_quantised_layers(params) and not unstacks(model, params)
    return IN_PLACE if in_stacks else GPU_OPTIONS


def decode_program(model: Model, params) -> Callable:
    """`decode_chunk` for the devices of the model. params: arrays or ShapeDtypeStructs."""
    options = decoding_options(model, params)
    if options is None or not all(supports(*option) for option in options.items()):
        return decode_chunk
    return decode_chunk_in_place if options is IN_PLACE else decode_chunk_on_gpus
