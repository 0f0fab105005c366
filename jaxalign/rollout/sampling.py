"""Draws one token per row: temperature, top-k, top-p, and keys that depend only on the row and the position."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

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
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))  # Hashable: programs are cached by it.
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is expected")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}; 0 (greedy) or at least {LEAST_TEMPERATURE} is expected")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; 0 (off) or more is expected")
        strange = next((token for token in self.stop_ids if not -(1 << 31) <= token < 1 << 31), None)
        if strange is not None:
            raise UserError(f"stop_ids has {strange}; token ids are expected")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; a number in (0, 1] is expected")

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the log-probabilities: 1 for greedy decoding, which defines none."""
        return self.temperature or 1.0

    @property
    def compiled(self) -> Sampling:
        """The fields that affect compilation; of the temperature, only whether it is zero."""
        return dataclasses.replace(self, max_new_tokens=1, temperature=1.0 if self.temperature else 0.0)


def section_sampling(section, stop_ids: tuple[int, ...]) -> Sampling:
    """The `Sampling` for a config section with temperature, top_k, top_p and max_new_tokens."""
    return Sampling(section.max_new_tokens, stop_ids, section.temperature, section.top_k, section.top_p)


def row_keys(key: jax.Array, rows_B: jax.Array) -> jax.Array:
    """One key per row, folded from the global row number."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def filter_logits(logits_BxV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Sets logits excluded by top-k or top-p (nucleus, arXiv 1904.09751) to -inf. The most likely token is always kept."""
    V = logits_BxV.shape[-1]
    if 0 < top_k < V:
        kth = jax.lax.top_k(logits_BxV, top_k)[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV < kth, -jnp.inf, logits_BxV)
    if top_p < 1:
        ordered = jnp.sort(logits_BxV, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(ordered, axis=-1)
        kept = jnp.where(before < top_p, ordered, jnp.inf)
        logits_BxV = jnp.where(logits_BxV < jnp.min(kept, axis=-1, keepdims=True), -jnp.inf, logits_BxV)
    return logits_BxV


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
    found = reached_BxN & positive
    last = positive.shape[1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1, keepdims=True)
    return jnp.where(jnp.any(found, axis=-1, keepdims=True), jnp.argmax(found, axis=-1, keepdims=True), last)


def sample(
    logits_BxV, row_keys_B, positions_B, sampling: Sampling, temperature: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [B] and their log-probabilities float32 [B]. temperature float32 []: `sampling.logprob_temperature` as an
    argument of the program, if it is not a constant in it (`Sampling.compiled`).

    The log-probability is that of the softmax at the sampling temperature *before* top-k and top-p. A trainer recomputes the
    same quantity for the policy and its reference, so that equal weights give a KL of 0 under every setting. The key of a
    token is folded from its row's key and its position.
    """
    scaled = logits_BxV.astype(jnp.float32) / (sampling.logprob_temperature if temperature is None else temperature)
    if sampling.temperature == 0:
        tokens = jnp.argmax(scaled, axis=-1)
    else:
        keys = jax.vmap(jax.random.fold_in)(row_keys_B, positions_B)
        filtered = filter_logits(scaled, sampling.top_k, sampling.top_p)
        tokens = draw(filtered, keys)
    # Subtract the maximum first: a common offset of the logits would cost precision below.
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    logprobs = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0] - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))
    return tokens.astype(jnp.int32), logprobs
