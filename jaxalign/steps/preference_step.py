"""The preference model: scores of whole sequences, and the jitted Bradley-Terry step on soft labels."""

from __future__ import annotations

import functools

import chex
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.models.heads import gather_positions
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, PairBatch, ScoredPairs
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.metrics import PreferenceMetrics
from jaxalign.steps.microbatch import Aux, total_weight
from jaxalign.steps.packed import answer_parts, pairs_alone
from jaxalign.steps.state import TrainState, gradient_step


def sequence_scores(model: Model, params, tokens, length):
    """float32 [B]: the output of the scalar head at the last token of each row.

    Args:
      tokens: int32 [B, T].
      length: int32 [B], at least 1.
    """
    chex.assert_shape(length, tokens.shape[:1])
    hidden = model.hidden(params, tokens)
    last = gather_positions(hidden, (length - 1)[:, None])[:, 0]
    return model.scores(params, last)


def row_scores(model: Model, params, rows: AnswerRows, length):
    """float32 [B]: `sequence_scores` for sequences of length int32 [B] in packed rows. The entries of sequences in other parts
    are meaningless."""
    chex.assert_equal_shape([rows.start, length])
    scores = model.scores(params, model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)).reshape(-1)
    return scores[jnp.clip(rows.start + length - 1, 0, scores.size - 1)]


def pair_scores(model: Model, params, batch: PairBatch | ScoredPairs, rows: AnswerRows | None = None):
    """float32 [B, 2]: `row_scores` of both sequences of each pair. rows: None gives each sequence its own row."""
    rows = pairs_alone(batch) if rows is None else rows
    return row_scores(model, params, rows, batch.length.reshape(-1)).reshape(-1, 2)


@functools.partial(MeshProgram, donate_argnames=("state",))
def preference_step(state: TrainState, arguments: PreferenceArguments) -> tuple[TrainState, PreferenceMetrics]:
    """One update: (state, metrics). The loss is the mean over all pairs of the batch by their weights, the accuracy that over
    the pairs whose label prefers an answer."""
    model, batch, packed = arguments.model, arguments.batch, arguments.packed
    chex.assert_shape([batch.label, batch.weight], batch.length.shape[:1])
    chex.assert_shape(batch.length, (None, 2))
    total = total_weight(batch.weight)
    decided = jnp.abs(batch.label - 0.5) > 1e-6
    total_decided = total_weight(batch.weight * decided)
    batch, packed = after(model.sharding, (batch, packed), (total, total_decided))

    def loss_fn(params, given):
        part, rows = given
        scores = pair_scores(model, params, part, rows)
        loss = bradley_terry(
            scores[:, 0], scores[:, 1], part.label, arguments.centering_coef, part.margin, mask=part.weight
        )
        right = (scores[:, 0] > scores[:, 1]) == (part.label > 0.5)
        counted = part.weight * (jnp.abs(part.label - 0.5) > 1e-6)
        loss = jnp.sum(loss * part.weight) / total
        return loss, Aux({"loss": loss, "accuracy": jnp.sum(right * counted) / total_decided})

    parts = answer_parts(batch, packed)
    state, aux, gradient = gradient_step(model, arguments.optimizer, state, loss_fn, parts, arguments.frozen)
    return state, PreferenceMetrics(**aux.sums, **vars(gradient))
