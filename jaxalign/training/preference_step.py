"""The preference model: scores of whole sequences and the jitted Bradley-Terry step on soft labels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.models.adapters.lora import join
from jaxalign.models.heads import gather_positions
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, PackedParts, PairBatch, ScoredPairs
from jaxalign.training.microbatch import Aux
from jaxalign.training.packed import pair_parts, pairs_alone
from jaxalign.training.state import TrainState, gradient_step


def sequence_scores(model: Model, params, tokens, length):
    """float32 [B]: the scalar head at the last token of each row, found by length (Pitfall 4). tokens [B, T], length [B]."""
    hidden = model.hidden(params, tokens)
    last = gather_positions(hidden, (length - 1)[:, None])[:, 0]
    return model.scores(params, last)


def row_scores(model: Model, params, rows: AnswerRows, length):
    """float32 [B]: `sequence_scores` of sequences of these lengths in packed rows; those of others mean nothing."""
    scores = model.scores(params, model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)).reshape(-1)
    return scores[jnp.clip(rows.start + length - 1, 0, scores.size - 1)]


def pair_scores(model: Model, params, batch: PairBatch | ScoredPairs, rows: AnswerRows | None = None):
    """float32 [B, 2]. rows: where the pairs stand; None: each sequence in a row of its own."""
    rows = pairs_alone(batch) if rows is None else rows
    return row_scores(model, params, rows, batch.length.reshape(-1)).reshape(-1, 2)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "centering_coef"), donate_argnames=("state",))
def preference_step(
    model: Model, optimizer, centering_coef: float, state: TrainState, batch: PairBatch, frozen=None,
    packed: PackedParts | None = None,
):  # fmt: skip
    """One update: (state, metrics). Loss and accuracy are means over the pairs of the whole batch.

    frozen: the parameters that are not trained, of a model with adapters. packed: the pairs in micro-batches as `pack_pairs`
    makes them, and then batch.tokens is not read; None: all at once.
    """
    total = jnp.maximum(jnp.sum(batch.weight), 1.0)
    decided = jnp.abs(batch.label - 0.5) > 1e-6
    total_decided = jnp.maximum(jnp.sum(batch.weight * decided), 1.0)
    batch, packed = after(model.sharding, (batch, packed), (total, total_decided))

    def loss_fn(params, given):
        part, rows = given
        scores = pair_scores(model, join(frozen, params), part, rows)
        loss = bradley_terry(scores[:, 0], scores[:, 1], part.label, centering_coef, part.margin, mask=part.weight)
        right = (scores[:, 0] > scores[:, 1]) == (part.label > 0.5)
        counted = part.weight * (jnp.abs(part.label - 0.5) > 1e-6)
        loss = jnp.sum(loss * part.weight) / total
        return loss, Aux({"loss": loss, "accuracy": jnp.sum(right * counted) / total_decided})

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, pair_parts(batch, packed))
    return state, {**aux.sums, **metrics}
