"""The preference model: scores of whole sequences and the jitted Bradley-Terry step on soft labels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.models.heads import gather_positions
from jaxalign.models.lora import join
from jaxalign.models.model import Model
from jaxalign.records import PairBatch, ScoredPairs
from jaxalign.training.microbatch import Aux, parts_of
from jaxalign.training.state import TrainState, gradient_step


def sequence_scores(model: Model, params, tokens, length):
    """float32 [B]: the scalar head at the last token of each row, found by length (Pitfall 4). tokens [B, T], length [B]."""
    hidden = model.hidden(params, tokens)
    last = gather_positions(hidden, (length - 1)[:, None])[:, 0]
    return model.scores(params, last)


def pair_scores(model: Model, params, batch: PairBatch | ScoredPairs):
    """float32 [B, 2]."""
    B, _, T = batch.tokens.shape
    scores = sequence_scores(model, params, batch.tokens.reshape(2 * B, T), batch.length.reshape(2 * B))
    return scores.reshape(B, 2)


@functools.partial(
    jax.jit, static_argnames=("model", "optimizer", "micro_batches", "centering_coef"), donate_argnames=("state",)
)
def preference_step(
    model: Model, optimizer, micro_batches: int, centering_coef: float, state: TrainState, batch: PairBatch, frozen=None
):
    """One update: (state, metrics). Loss and accuracy are means over the pairs of the whole batch.

    frozen: the parameters that are not trained, of a model with adapters.
    """
    total = jnp.maximum(jnp.sum(batch.weight), 1.0)
    decided = jnp.abs(batch.label - 0.5) > 1e-6
    total_decided = jnp.maximum(jnp.sum(batch.weight * decided), 1.0)

    def loss_fn(params, part: PairBatch):
        scores = pair_scores(model, join(frozen, params), part)
        loss = bradley_terry(scores[:, 0], scores[:, 1], part.label, centering_coef, part.margin, mask=part.weight)
        right = (scores[:, 0] > scores[:, 1]) == (part.label > 0.5)
        counted = part.weight * (jnp.abs(part.label - 0.5) > 1e-6)
        loss = jnp.sum(loss * part.weight) / total
        return loss, Aux({"loss": loss, "accuracy": jnp.sum(right * counted) / total_decided})

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, parts_of(batch, micro_batches))
    return state, {**aux.sums, **metrics}
