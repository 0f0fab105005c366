"""Reference for the engine: sampling by definition, with a full forward pass for every token and no cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.models.model import Model
from jaxalign.rollout.sampling import RowSettings, Sampling, Variant, sample


def respond(model: Model, params, prompts, key, sampling: Sampling, rows) -> list[tuple[tuple[int, ...], list[float]]]:
    """Return (ids, log-probs) of one response per prompt, which has the row number rows[i]."""
    length = np.asarray([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), max(length) + sampling.max_new_tokens), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    out, running = [((), []) for _ in prompts], set(range(len(prompts)))
    for _ in range(sampling.max_new_tokens):
        drawn, logprobs = (np.asarray(x) for x in _next(model, params, tokens, length, key, np.asarray(rows), sampling))
        for i in sorted(running):
            ids, before = out[i]
            out[i] = ((*ids, int(drawn[i])), [*before, float(logprobs[i])])
            tokens[i, length[i]] = drawn[i]
            length[i] += 1
            if drawn[i] in sampling.stop_ids:
                running.remove(i)
    return out


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def _next(model: Model, params, tokens, length, key, rows, sampling: Sampling):
    hidden = model.hidden(params, tokens)[jnp.arange(len(length)), length - 1]
    return sample(model.logits(params, hidden), row_keys(key, rows), length, *settings(sampling, len(rows)))


def row_keys(key: jax.Array, rows_B) -> jax.Array:
    """One key per row, folded from the row number."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)


def settings(sampling: Sampling, count: int) -> tuple[RowSettings, Variant]:
    """The arguments of `sample` for `count` rows with the same settings, without keys and stop ids, which it does not read."""
    values = (sampling.temperature, np.float32), (sampling.top_k, np.int32), (sampling.top_p, np.float32)
    return RowSettings(*(jnp.full(count, *value) for value in values), None, None), sampling.variant("threefry2x32")
