"""Direct preference optimisation: the log-probabilities of whole answers, and the jitted step for all objectives."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms.masked import masked_sum
from jaxalign.config import DPOConfig
from jaxalign.models.adapters.lora import join
from jaxalign.models.heads import gather_positions, length_mask
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerPairs, AnswerRows, PackedParts
from jaxalign.registry.objectives import objectives_of
from jaxalign.steps.arguments import DirectArguments, LogprobArguments
from jaxalign.steps.metrics import DirectMetrics
from jaxalign.steps.microbatch import Aux, total_weight
from jaxalign.steps.objectives import DirectInputs, anchors, learns_from_ties, objective_loss
from jaxalign.steps.packed import answer_parts, each_part, of_answers, pairs_alone
from jaxalign.steps.state import TrainState, gradient_step


class AnswerLogprobs(NamedTuple):
    """logprobs float32 [B, 2]: the log-probability of each answer, in nats. tokens float32 [B, 2]: its number of tokens."""

    logprobs: jax.Array
    tokens: jax.Array


def _answer_logprobs(model: Model, params, pairs: AnswerPairs, rows: AnswerRows) -> AnswerLogprobs:
    """The log-probabilities of the answers in these rows; entries of other answers are meaningless."""
    B, T = len(pairs.length), rows.tokens.shape[1]
    hidden = model.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    targets = gather_positions(rows.tokens, rows.heads + 1)
    stats = model.token_stats(params, gather_positions(hidden, rows.heads), targets, used=rows.used)
    mask = length_mask((pairs.length - pairs.prompt_length).reshape(2 * B), T)
    logprobs = jnp.where(mask > 0, of_answers(stats.logprobs, rows.first, T), 0)
    return AnswerLogprobs(jnp.sum(logprobs, axis=1).reshape(B, 2), jnp.sum(mask, axis=1).reshape(B, 2))


def _each_answer(model: Model, params, pairs: AnswerPairs, packed: PackedParts | None) -> AnswerLogprobs:
    if packed is None:
        return _answer_logprobs(model, params, pairs, pairs_alone(pairs))
    B = len(pairs.length)
    flat = each_part(packed, lambda rows: _answer_logprobs(model, params, pairs, rows).logprobs.reshape(2 * B))
    return AnswerLogprobs(flat.reshape(B, 2), (pairs.length - pairs.prompt_length).astype(jnp.float32))


@MeshProgram
def answer_logprobs(arguments: LogprobArguments) -> AnswerLogprobs:
    """The log-probabilities of both answers of each pair."""
    return _each_answer(arguments.model, arguments.params, arguments.pairs, arguments.packed)


def sorts_the_batch(section: DPOConfig) -> bool:
    """Whether the objective compares the pairs of a batch with each other, so that the batch cannot be split."""
    return any(objective.sorts_the_batch for objective in objectives_of(section.objective))


def _inputs(section: DPOConfig, policy: AnswerLogprobs, pairs: AnswerPairs) -> DirectInputs:
    """The objective's inputs for these pairs, with anchor 0."""
    columns = *policy.logprobs.T, *pairs.reference.T, *policy.tokens.T
    return DirectInputs(*columns, pairs.label, pairs.weight, jnp.float32(0.0), section)


@functools.partial(MeshProgram, donate_argnames=("state",))
def direct_step(state: TrainState, arguments: DirectArguments) -> tuple[TrainState, DirectMetrics]:
    """One update: (state, metrics). Metrics are means over the rows of the batch that count, except those of the gradient, of
    `anchor` and of `undecided`.

    An update is skipped if no label of the batch prefers an answer, unless the objective `learns_from_ties`.
    """
    model, section, frozen = arguments.model, arguments.section, arguments.frozen
    batch, packed = arguments.batch, arguments.packed
    chex.assert_shape([batch.label, batch.weight], batch.length.shape[:1])
    chex.assert_shape([batch.prompt_length, batch.length, batch.reference], (len(batch.label), 2))
    total = total_weight(batch.weight)
    batch, packed = after(model.sharding, (batch, packed), total)
    # Each objective's anchor is computed over the whole batch before it is split; it is 0 for objectives without an anchor.
    objectives = objectives_of(section.objective)
    anchored = (jnp.float32(0.0),) * len(objectives)
    if any(objective.anchor is not None for objective in objectives):
        policy = _each_answer(model, join(frozen, state.params), batch, packed)
        anchored = anchors(_inputs(section, policy, batch))
    batch, packed = after(model.sharding, (batch, packed), anchored)

    def loss_fn(params, part):
        pairs, rows = part
        inputs = _inputs(section, _answer_logprobs(model, params, pairs, rows), pairs)
        loss, reported = objective_loss(inputs, anchored)
        means = {name: masked_sum(x, pairs.weight) / total for name, x in ({"loss": loss} | reported).items()}
        return means["loss"], Aux(means)

    informative = learns_from_ties(section) | jnp.any((batch.weight > 0) & (batch.label != 0.5))
    state, aux, gradient = gradient_step(
        model, arguments.optimizer, state, loss_fn, answer_parts(batch, packed), frozen, informative
    )
    undecided = 1 - informative.astype(jnp.float32)
    return state, DirectMetrics(**aux.sums, **vars(gradient), anchor=sum(anchored), undecided=undecided)
