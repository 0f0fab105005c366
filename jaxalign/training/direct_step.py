"""Direct preference optimisation: the log-probabilities of whole answers, and the jitted step of every objective."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.masked import masked_sum
from jaxalign.config import Dpo
from jaxalign.models.adapters.lora import join
from jaxalign.models.heads import gather_positions, length_mask
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerPairs, AnswerRows, PackedParts
from jaxalign.registry.objectives import objectives_of
from jaxalign.training.microbatch import Aux
from jaxalign.training.objectives import DirectInputs, anchors, objective_loss
from jaxalign.training.packed import each_part, of_answers, pair_parts, pairs_alone
from jaxalign.training.state import TrainState, gradient_step


class AnswerLogprobs(NamedTuple):
    """logprobs float32 [B, 2]: the sum over an answer's tokens; tokens float32 [B, 2]: how many there are."""

    logprobs: jax.Array
    tokens: jax.Array


def _answer_logprobs(model: Model, params, pairs: AnswerPairs, rows: AnswerRows) -> AnswerLogprobs:
    """Of the answers that stand in these rows; those of others mean nothing."""
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


@functools.partial(jax.jit, static_argnums=0)
def answer_logprobs(model: Model, params, pairs: AnswerPairs, packed: PackedParts | None = None) -> AnswerLogprobs:
    """Of both answers of each pair. packed: as `pack_pairs` makes it, and then pairs.tokens is not read; None: each answer in a
    row of its own."""
    return _each_answer(model, params, pairs, packed)


def sorts_the_batch(section: Dpo) -> bool:
    """Whether the objective compares the pairs of a batch with each other, so that the batch cannot be split."""
    return any(objective.sorts_the_batch for objective in objectives_of(section.objective))


def _inputs(section: Dpo, policy: AnswerLogprobs, pairs: AnswerPairs) -> DirectInputs:
    """The inputs of the objective on these pairs, without an anchor."""
    columns = *policy.logprobs.T, *pairs.reference.T, *policy.tokens.T
    return DirectInputs(*columns, pairs.label, pairs.weight, jnp.float32(0.0), section)


def _anchors(model: Model, section: Dpo, params, batch: AnswerPairs, packed: PackedParts | None) -> tuple[jax.Array, ...]:
    """What each objective takes from the whole batch before it is split; 0 for those without an anchor."""
    objectives = objectives_of(section.objective)
    if all(objective.anchor is None for objective in objectives):
        return (jnp.float32(0.0),) * len(objectives)
    return anchors(_inputs(section, _each_answer(model, params, batch, packed), batch))


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "section"), donate_argnames=("state",))
def direct_step(
    model: Model, optimizer, section: Dpo, state: TrainState, batch: AnswerPairs, frozen=None,
    packed: PackedParts | None = None,
):  # fmt: skip
    """One update: (state, metrics). All are means over the rows of the whole batch that count (Decision 7).

    frozen: the parameters that are not trained, of a model with adapters. packed: as in `answer_logprobs`; its parts are the
    micro-batches.
    """
    total = jnp.maximum(jnp.sum(batch.weight), 1.0)
    batch, packed = after(model.sharding, (batch, packed), total)
    anchored = _anchors(model, section, join(frozen, state.params), batch, packed)
    batch, packed = after(model.sharding, (batch, packed), anchored)

    def loss_fn(params, part):
        pairs, rows = part
        inputs = _inputs(section, _answer_logprobs(model, join(frozen, params), pairs, rows), pairs)
        loss, reported = objective_loss(inputs, anchored)
        mean = lambda x: masked_sum(x, pairs.weight) / total  # noqa: E731
        return mean(loss), Aux({"loss": mean(loss)} | {name: mean(x) for name, x in reported.items()})

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, pair_parts(batch, packed))
    return state, {**aux.sums, **metrics, "anchor": sum(anchored)}
