"""The preference model: scores of whole sequences, the jitted Bradley-Terry step on soft labels, and the step that trains a
smaller model to predict the scores of a larger one."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry, score_regression
from jaxalign.models.heads import gather_positions
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerRows, PairBatch, ScoredPairs
from jaxalign.steps.arguments import DistillArguments, PreferenceArguments
from jaxalign.steps.metrics import DistillMetrics, PreferenceMetrics
from jaxalign.steps.microbatch import Aux, parts_of, total_weight
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
    the pairs whose label prefers an answer; NaN if there are none."""
    model, batch, packed = arguments.model, arguments.batch, arguments.packed
    chex.assert_shape([batch.label, batch.weight], batch.length.shape[:1])
    chex.assert_shape(batch.length, (None, 2))
    total = total_weight(batch.weight)
    decided = jnp.abs(batch.label - 0.5) > 1e-6
    total_decided = jnp.sum(batch.weight * decided)
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


@functools.partial(MeshProgram, donate_argnames=("state",))
def distill_step(state: TrainState, arguments: DistillArguments) -> tuple[TrainState, DistillMetrics]:
    """One update: (state, metrics).

    Objective "regression" is the mean squared error of the scores. "pairs" is the mean Bradley-Terry loss with the teacher's
    probability as the soft label. "both" is their sum. `scale` converts a difference of normalised scores to the teacher's
    log-odds.
    """
    model, objective, scale, batch = arguments.model, arguments.objective, arguments.scale, arguments.batch
    rows = batch.target.shape[0]
    chex.assert_shape(batch.target, (rows, 2))

    def loss_fn(params, part: ScoredPairs):
        scores, target, losses = pair_scores(model, params, part), part.target, {}
        if objective != "pairs":
            losses["regression"] = jnp.sum(score_regression(scores, target)) / (2 * rows)
        if objective != "regression":
            label = jax.nn.sigmoid(scale * (target[:, 0] - target[:, 1]))
            losses["pairs"] = jnp.sum(bradley_terry(scale * scores[:, 0], scale * scores[:, 1], label)) / rows
        alike = (scores[:, 0] > scores[:, 1]) == (target[:, 0] > target[:, 1])
        loss = sum(losses.values())
        return loss, Aux({"loss": loss, "agreement": jnp.sum(alike) / rows})

    parts = parts_of(batch, arguments.micro_batches)
    state, aux, gradient = gradient_step(model, arguments.optimizer, state, loss_fn, parts)
    return state, DistillMetrics(**aux.sums, **vars(gradient))
