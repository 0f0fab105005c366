"""Generation: jitted prefill and decode over batches of ragged prompts.

`generate` is the jitted core. `Engine` feeds it from Python lists: it sorts a queue by length, pads to a few fixed
shapes so that nothing recompiles, and puts the responses back in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.errors import UserError
from jaxalign.models.heads import gather_positions, lm_logits
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Rollout
from jaxalign.rollout.sampling import Sampling, row_keys, sample


class _Loop(NamedTuple):
    t: jax.Array
    token: jax.Array
    done: jax.Array
    tokens: jax.Array
    logprobs: jax.Array
    cache: object


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def generate(model: Model, params, prompts, prompt_length, key, rows, sampling: Sampling) -> Rollout:
    """Samples one response a row.

    prompts int32 [B, P], right-padded; prompt_length int32 [B] >= 1 (0 marks a row that is only there to fill the
    batch: it ends at once); key: a run's key folded with its step; rows int32 [B]: global row numbers.
    params lie as `Model.for_generation` puts them. Returns a Rollout with T = P + max_new_tokens and N = max_new_tokens, its
    rows split as in training.
    """
    B, P = prompts.shape
    training, model = model, model.generation
    N = sampling.max_new_tokens
    unembedding = model.unembedding(params).astype(model.config.compute_dtype)
    keys = row_keys(key, rows)
    stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)

    def logits(hidden_BxD):
        return lm_logits(hidden_BxD, unembedding, model.config.final_softcap)

    def draw(hidden_BxD, t):
        token, logprob = sample(logits(hidden_BxD), keys, prompt_length + t, sampling)
        return token, logprob, jnp.any(token[:, None] == stop_ids[None, :], axis=-1)

    hidden, cache = model.prefill(params, prompts, P + N)
    token, logprob, stopped = draw(gather_positions(hidden, (prompt_length - 1)[:, None])[:, 0], 0)
    tokens = jnp.zeros((B, N), jnp.int32).at[:, 0].set(token)
    logprobs = jnp.zeros((B, N), jnp.float32).at[:, 0].set(logprob)
    filler = prompt_length == 0
    slots = jnp.arange(P + N)[None, :]

    def step(loop: _Loop) -> _Loop:
        t = loop.t
        visible = (slots < prompt_length[:, None]) | ((slots >= P) & (slots < P + t))
        hidden, cache = model.decode(params, loop.token, prompt_length + t - 1, visible, loop.cache, P + t - 1)
        token, logprob, stopped = draw(hidden, t)
        token = jnp.where(loop.done, 0, token)
        return _Loop(
            t + 1,
            token,
            loop.done | stopped,
            jax.lax.dynamic_update_slice(loop.tokens, token[:, None], (0, t)),
            jax.lax.dynamic_update_slice(loop.logprobs, jnp.where(loop.done, 0.0, logprob)[:, None], (0, t)),
            cache,
        )

    start = _Loop(jnp.int32(1), token, stopped | filler, tokens, logprobs, cache)
    end = jax.lax.while_loop(lambda loop: (loop.t < N) & ~jnp.all(loop.done), step, start)
    rollout = _assemble(prompts, prompt_length, end.tokens, end.logprobs, stop_ids, end.t)
    return jax.tree.map(lambda x: training.constrain(x, ("batch",) + (None,) * (x.ndim - 1)), rollout)


def _assemble(prompts, prompt_length, tokens, logprobs, stop_ids, steps) -> Rollout:
    """Joins each prompt with its response without a gap; lengths come from where the first stop token stands."""
    P, N = prompts.shape[1], tokens.shape[1]
    is_stop = jnp.any(tokens[:, :, None] == stop_ids[None, None, :], axis=-1) & (jnp.arange(N)[None, :] < steps)
    ended = jnp.any(is_stop, axis=-1)
    length = jnp.where(ended, jnp.argmax(is_stop, axis=-1) + 1, jnp.minimum(steps, N)).astype(jnp.int32)
    length = jnp.where(prompt_length == 0, 0, length)
    inside = jnp.arange(N)[None, :] < length[:, None]
    place = jnp.arange(P + N)[None, :]
    response = gather_positions(tokens, place - prompt_length[:, None])
    joined = jnp.where(place < prompt_length[:, None], jnp.pad(prompts, ((0, 0), (0, N))), response)
    joined = jnp.where(place < (prompt_length + length)[:, None], joined, 0)
    return Rollout(joined, prompt_length, length, jnp.where(inside, logprobs, 0.0), ended)


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response: its token ids (the stop token, if any, included), whether it ended by itself, and the sum of
    its tokens' log-probabilities at the sampling temperature."""

    ids: tuple[int, ...]
    ended: bool
    logprob: float


@dataclasses.dataclass(frozen=True)
class Engine:
    """Feeds `generate` from a list of prompts.

    batch: rows in one call (a multiple of what the mesh splits a batch into while it samples). bucket: prompt lengths are
    padded up to a multiple of this, so that few shapes are compiled. max_length: prompt and response together.
    """

    model: Model
    batch: int
    max_length: int
    bucket: int = 32

    def pad(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """int32 [batch, P] and lengths [batch]; missing rows have length 0. Raises UserError on a prompt that cannot fit."""
        longest = max(len(p) for p in prompts)
        limit = self.max_length - max_new_tokens
        if longest > limit:
            raise UserError(
                f"a prompt has {longest} tokens, but model.max_length {self.max_length} less {max_new_tokens} new tokens "
                f"leaves room for {limit}; raise model.max_length or shorten the prompt"
            )
        if min(len(p) for p in prompts) == 0:
            raise UserError("a prompt is empty; at least one token is expected")
        P = min(limit, -(-longest // self.bucket) * self.bucket)
        tokens, length = np.zeros((self.batch, P), np.int32), np.zeros(self.batch, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)], length[i] = prompt, len(prompt)
        return tokens, length

    def rollout(self, params, prompts, key, rows: Sequence[int], sampling: Sampling) -> Rollout:
        """One batch on the device: at most `batch` prompts; `rows` are their global numbers."""
        tokens, length = self.pad(prompts, sampling.max_new_tokens)
        numbers = np.zeros(self.batch, np.int32)
        numbers[: len(rows)] = rows
        where = None if self.model.sharding is None else self.model.sharding.generation
        tokens, length, numbers = place_rows(where, (tokens, length, numbers))
        return generate(self.model, self.model.for_generation(params), tokens, length, key, numbers, sampling)

    def respond(self, params, prompts, key, sampling: Sampling, rows: Sequence[int], progress=None) -> list[Response]:
        """Responses to a queue of any length, in its order. `progress(rows, tokens)` is called after each batch.

        Prompt i has the global row number rows[i], whatever batch it falls into. An empty queue has no responses.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        params = self.model.for_generation(params)
        out: list[Response | None] = [None] * len(prompts)
        for start in range(0, len(order), self.batch):
            index = order[start : start + self.batch]
            rollout = self.rollout(params, [prompts[i] for i in index], key, [rows[i] for i in index], sampling)
            rollout = fetch(rollout)
            for row, i in enumerate(index):
                begin, count = int(rollout.prompt_length[row]), int(rollout.response_length[row])
                ids = tuple(int(x) for x in rollout.tokens[row, begin : begin + count])
                out[i] = Response(ids, bool(rollout.ended[row]), float(rollout.logprobs[row].sum()))
            if progress is not None:
                progress(len(index), int(rollout.response_length[: len(index)].sum()))
        return out
