"""Decoding in chunks: several steps of all rows in one program, which stops early once enough rows have ended."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxalign.models.cache import Tiers
from jaxalign.models.heads import lm_logits
from jaxalign.models.model import Model
from jaxalign.rollout.sampling import Variant, sample, unpack

NOTHING, NOT_FINITE = -1, -2
"""Markers in place of a token: the row generated none; the row ended because its logits were not all finite."""


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


@functools.partial(jax.jit, static_argnames=("model", "variant", "steps"), donate_argnames="tiers")
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
            jax.lax.dynamic_update_slice(whole, column[None], (loop.t, 0))
            for whole, column in zip(loop.drawn, columns, strict=True)
        )
        left = jnp.where(stopped | ~finite, 0, jnp.maximum(loop.left - 1, 0))
        return _Loop(loop.t + 1, jnp.maximum(tokens, 0), left, drawn, tiers)

    B = len(token)
    drawn = jnp.full((steps, B), NOTHING, jnp.int32), jnp.zeros((steps, B), jnp.float32)
    end = jax.lax.while_loop(goes_on, step, _Loop(jnp.int32(0), token, left, drawn, decoding.begin(tiers)))
    # Replicated on every device, so that every process can read them.
    return decoding.end(end.tiers), Drawn(*(model.sharding.constrain(x, (None,) * x.ndim) for x in (*end.drawn, end.t)))
