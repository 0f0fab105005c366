"""Direct preference optimisation: the log-probabilities of whole answers, and the jitted step of every objective."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.direct_preference import bco_baseline, dpo, mixed_dpo, sft_loss
from jaxalign.algorithms.kto import kto, kto_baseline
from jaxalign.algorithms.masked import masked_sum
from jaxalign.algorithms.reference_free import cpo, orpo, simpo
from jaxalign.config import Dpo
from jaxalign.models.adapters.lora import join
from jaxalign.models.heads import gather_positions, length_mask
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.records import AnswerPairs, AnswerRows, PackedParts
from jaxalign.training.microbatch import Aux
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
    """Whether the objective compares the pairs of a batch with each other, so that they must all be there at once."""
    return any(part.startswith("aot") for part in section.objective.split("+"))


def _objective(section: Dpo, policy: AnswerLogprobs, pairs: AnswerPairs, anchor) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss [B], what is reported [B] each) of a batch or a part of it."""
    (first, second), (first_mean, second_mean) = policy.logprobs.T, (policy.logprobs / jnp.maximum(policy.tokens, 1)).T
    ref_first, ref_second = pairs.reference.T
    beta, label, mask = section.beta, pairs.label, pairs.weight
    nll = sft_loss(first_mean, second_mean, 1.0, mask)
    weight = section.sft_weight
    if weight is None:
        weight = 1.0 if section.objective in ("orpo", "cpo") else 0.0
    if section.objective == "kto":
        sides = section.desirable_weight, section.undesirable_weight
        loss, rewards = kto(first, ref_first, label, anchor, beta, *sides, mask)
        # Only good answers are to be repeated. The margin is the reward's lead in the direction that is wanted.
        nll, margins = nll * label, jnp.where(label > 0.5, rewards, -rewards)
        reported = {"chosen_reward": 2 * label * rewards, "rejected_reward": 2 * (1 - label) * rewards}
    else:
        if section.objective == "orpo":
            loss, stats = orpo(first_mean, second_mean, beta, label, mask=mask)
        elif section.objective == "cpo":
            loss, stats = cpo(first, second, beta, label, mask=mask)
        elif section.objective == "simpo":
            loss, stats = simpo(first_mean, second_mean, beta, section.margin, label, mask)
        elif "+" not in section.objective:
            loss, stats = dpo(
                first, second, ref_first, ref_second, beta, label, section.objective, section.label_smoothing,
                policy.tokens[:, 0], policy.tokens[:, 1], mask, anchor,
            )  # fmt: skip
        else:
            kinds = section.objective.split("+")
            weights = dict(zip(kinds, section.weights or (1.0,) * len(kinds), strict=True))
            loss, stats = mixed_dpo(
                first, second, ref_first, ref_second, weights, beta, label, section.label_smoothing,
                policy.tokens[:, 0], policy.tokens[:, 1], mask, anchor,
            )  # fmt: skip
        margins = stats.margins
        reported = {"chosen_reward": stats.chosen_rewards, "rejected_reward": stats.rejected_rewards}
    reported |= {"margin": margins, "accuracy": (margins > 0).astype(jnp.float32), "nll": nll}
    return loss + weight * nll, reported


def _anchor(model: Model, section: Dpo, params, batch: AnswerPairs, packed: PackedParts | None) -> jax.Array:
    """What an objective takes from the whole batch before it is split: KTO's KL and BCO's mean reward; else 0."""
    if {"kto", "bco_pair"}.isdisjoint(section.objective.split("+")):
        return jnp.float32(0.0)
    logprobs, reference, mask = _each_answer(model, params, batch, packed).logprobs, batch.reference, batch.weight
    if section.objective == "kto":
        return kto_baseline(logprobs[:, 1], reference[:, 1], mask)
    return bco_baseline(*logprobs.T, *reference.T, section.beta, mask)


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
    anchor = _anchor(model, section, join(frozen, state.params), batch, packed)
    batch, packed = after(model.sharding, (batch, packed), anchor)

    def loss_fn(params, part):
        pairs, rows = part
        loss, reported = _objective(section, _answer_logprobs(model, join(frozen, params), pairs, rows), pairs, anchor)
        mean = lambda x: masked_sum(x, pairs.weight) / total  # noqa: E731
        return mean(loss), Aux({"loss": mean(loss)} | {name: mean(x) for name, x in reported.items()})

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, pair_parts(batch, packed))
    return state, {**aux.sums, **metrics, "anchor": anchor}
