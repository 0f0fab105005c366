"""Draws one token per row: each row has its own temperature, top-k, top-p and key; keys depend only on row and position."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.config.constraints import at_least
from jaxalign.config.schema import checked
from jaxalign.errors import UserError

BLOCK = 128
"""The number of vocabulary entries per block of the two-level cumulative sum."""
LEAST_TEMPERATURE = 1e-6
"""The lowest temperature above 0: dividing logits by a smaller one may overflow float32."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings. temperature 0 is greedy; top_k 0 and top_p 1 filter nothing. A token in stop_ids ends a response and
    is part of it."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        kinds = {"max_new_tokens": (int, at_least(1)), "temperature": (float,), "top_k": (int, at_least(0)), "top_p": (float,)}
        for name, (kind, *limit) in kinds.items():
            object.__setattr__(self, name, checked(getattr(self, name), kind, name, *limit))
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}; 0 (greedy) or at least {LEAST_TEMPERATURE} is expected")
        strange = next((token for token in self.stop_ids if not -(1 << 31) <= token < 1 << 31), None)
        if strange is not None:
            raise UserError(f"stop_ids has {strange}; token ids are expected")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; a number in (0, 1] is expected")

    def variant(self, key_impl: Any) -> Variant:
        """The parts that a program needs to draw tokens with these settings. key_impl: as from `jax.random.key_impl`."""
        largest_k = 1 << (self.top_k - 1).bit_length() if self.top_k else 0
        return Variant(key_impl, self.temperature == 0, self.temperature > 0, largest_k, self.top_p < 1)

    def packed(self, key: jax.Array) -> np.ndarray:
        """int32 [F]: the settings and a PRNG key as a column of `unpack`."""
        floats = np.asarray([self.temperature, self.top_p], np.float32).view(np.int32)
        words = np.asarray(jax.random.key_data(key), np.uint32).view(np.int32)
        top_k, stop_ids = np.asarray([min(self.top_k, 2**31 - 1)], np.int32), np.asarray(self.stop_ids, np.int32)
        return np.concatenate([top_k, floats, words, stop_ids])


@dataclasses.dataclass(frozen=True)
class Variant:
    """The parts that a compiled program contains in order to draw tokens; static. Rows with any settings that need no other
    parts share the program.

    Attributes:
      key_impl: the implementation of the PRNG keys.
      greedy: whether rows may have temperature 0.
      draws: whether rows may have a temperature above 0.
      largest_k: the largest top_k of a row, rounded up to a power of two; 0: no row has top_k.
      top_p: whether rows may have top_p below 1.
    """

    key_impl: Any
    greedy: bool = False
    draws: bool = True
    largest_k: int = 0
    top_p: bool = False

    def joined(self, other: Variant) -> Variant:
        """The variant for rows of both. Both have the same `key_impl`."""
        greedy, draws, top_p = self.greedy or other.greedy, self.draws or other.draws, self.top_p or other.top_p
        return Variant(self.key_impl, greedy, draws, max(self.largest_k, other.largest_k), top_p)

    def fields(self, stop_ids: int) -> int:
        """The number of rows of the array for `unpack`, with space for this many stop ids."""
        return 3 + _key_words(self.key_impl) + max(4, 1 << max(0, stop_ids - 1).bit_length())


class RowSettings(NamedTuple):
    """The settings of each row: temperature float32 [B], 0 for greedy; top_k int32 [B]; top_p float32 [B]; keys [B], PRNG keys;
    stop_ids int32 [S, B], -1 where a row has fewer."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    keys: jax.Array
    stop_ids: jax.Array


def unpack(packed_FxB: jax.Array, key_impl: Any) -> RowSettings:
    """The settings in the columns of an int32 array: one array is copied to the devices faster than five."""
    last = 3 + _key_words(key_impl)
    temperature, top_p = (jax.lax.bitcast_convert_type(packed_FxB[i], jnp.float32) for i in (1, 2))
    words = jax.lax.bitcast_convert_type(packed_FxB[3:last], jnp.uint32)
    return RowSettings(temperature, packed_FxB[0], top_p, jax.random.wrap_key_data(words.T, impl=key_impl), packed_FxB[last:])


@functools.cache
def _key_words(key_impl: Any) -> int:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=key_impl))).shape[0]


def section_sampling(section, stop_ids: tuple[int, ...]) -> Sampling:
    """The `Sampling` for a config section with temperature, top_k, top_p and max_new_tokens."""
    return Sampling(section.max_new_tokens, stop_ids, section.temperature, section.top_k, section.top_p)


def filter_logits(
    logits_BxV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, largest_k: int, nucleus: bool
) -> jax.Array:
    """Sets logits excluded by top-k or top-p (nucleus, arXiv 1904.09751) to -inf. The most likely token is always kept.

    Args:
      logits_BxV: float32.
      top_k_B: int32; 0, or a number from the vocabulary size, filters nothing.
      top_p_B: float32; 1 filters nothing.
      largest_k: a bound of top_k_B; 0: no row has top-k.
      nucleus: whether a row has top_p below 1.
    """
    V = logits_BxV.shape[-1]
    if not largest_k and not nucleus:
        return logits_BxV
    if nucleus:
        ordered = jnp.sort(logits_BxV, axis=-1, descending=True)
    else:
        ordered = jax.lax.top_k(logits_BxV, min(largest_k, V))[0]
    least = jnp.full_like(ordered[:, :1], -jnp.inf)
    if largest_k:
        k = top_k_B[:, None]
        kth = jnp.take_along_axis(ordered, jnp.clip(k - 1, 0, ordered.shape[-1] - 1), axis=-1)
        least = jnp.where((0 < k) & (k < V), kth, -jnp.inf)
        ordered = jnp.where(ordered < least, -jnp.inf, ordered)
    if nucleus:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where(before < top_p_B[:, None], ordered, jnp.inf)
        least = jnp.where(top_p_B[:, None] < 1, jnp.maximum(least, jnp.min(kept, axis=-1, keepdims=True)), least)
    return jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)


def draw(logits_BxV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """int32 [B]: one token from each row's softmax, by looking up one uniform number per row in the cumulative probabilities,
    first over blocks and then within the block. Noise for every token of the vocabulary would dominate a small model's step."""
    B, V = logits_BxV.shape
    weights = jnp.exp(logits_BxV - jnp.max(logits_BxV, axis=-1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    until = jnp.cumsum(sums, axis=-1)
    wanted = jax.vmap(jax.random.uniform)(keys_B) * until[:, -1]
    block = _first(until > wanted[:, None], sums)
    before = jnp.where(block > 0, jnp.take_along_axis(until, jnp.maximum(block - 1, 0), axis=-1), 0.0)
    own = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    place = _first(jnp.cumsum(own, axis=-1) > wanted[:, None] - before, own)
    return (block * BLOCK + place)[:, 0].astype(jnp.int32)


def _first(reached_BxN: jax.Array, weights_BxN: jax.Array) -> jax.Array:
    """int [B, 1]: the first reached index with a positive weight; if rounding leaves none, the last index with a
    positive weight."""
    positive = weights_BxN > 0
    usable = reached_BxN & positive
    last = positive.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1, keepdims=True)
    return jnp.where(jnp.any(usable, axis=-1, keepdims=True), jnp.argmax(usable, axis=-1, keepdims=True), last)


def sample(
    logits_BxV: jax.Array, row_keys_B: jax.Array, positions_B: jax.Array, settings: RowSettings, variant: Variant
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [B] and their log-probabilities float32 [B].

    The log-probability is that of the softmax at the sampling temperature *before* top-k and top-p. A trainer recomputes the
    same quantity for the policy and its reference, so that equal weights give a KL of 0 under every setting. The key of a
    token is folded from its row's key, which is folded from the row number, and its position. `settings.keys` is not read.
    """
    logits_BxV = logits_BxV.astype(jnp.float32)
    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1.0)
    # XLA replaces a division by a plain broadcast with a product with the reciprocal, which rounds differently.
    scaled = logits_BxV / jnp.where(jnp.isnan(logits_BxV), 1.0, temperature[:, None])
    if variant.draws:
        keys = jax.vmap(jax.random.fold_in)(row_keys_B, positions_B)
        tokens = draw(filter_logits(scaled, settings.top_k, settings.top_p, variant.largest_k, variant.top_p), keys)
        if variant.greedy:
            tokens = jnp.where(settings.temperature > 0, tokens, jnp.argmax(scaled, axis=-1))
    else:
        tokens = jnp.argmax(scaled, axis=-1)
    # Subtract the maximum first: a common offset of the logits would cost precision below.
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    logprobs = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))
    return tokens.astype(jnp.int32), logprobs
