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
from jaxalign.models.heads import gather_positions, length_mask, response_positions
from jaxalign.models.lora import join
from jaxalign.models.model import Model
from jaxalign.records import AnswerPairs
from jaxalign.training.microbatch import Aux, parts_of, split
from jaxalign.training.state import TrainState, gradient_step


class AnswerLogprobs(NamedTuple):
    """logprobs float32 [B, 2]: the sum over an answer's tokens; tokens float32 [B, 2]: how many there are."""

    logprobs: jax.Array
    tokens: jax.Array


def _answer_logprobs(model: Model, params, pairs: AnswerPairs) -> AnswerLogprobs:
    B, _, T = pairs.tokens.shape
    tokens, start, length = (x.reshape(2 * B, *x.shape[2:]) for x in (pairs.tokens, pairs.prompt_length, pairs.length))
    place = response_positions(start, T)
    hidden = gather_positions(model.hidden(params, tokens), place - 1)
    stats = model.token_stats(params, hidden, gather_positions(tokens, place))
    mask = length_mask(length - start, T)
    return AnswerLogprobs(jnp.sum(stats.logprobs * mask, axis=1).reshape(B, 2), jnp.sum(mask, axis=1).reshape(B, 2))


answer_logprobs = jax.jit(_answer_logprobs, static_argnums=0)


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


def _anchor(model: Model, section: Dpo, params, batch: AnswerPairs) -> jax.Array:
    """What an objective takes from the whole batch before it is split: KTO's KL and BCO's mean reward; else 0."""
    if {"kto", "bco_pair"}.isdisjoint(section.objective.split("+")):
        return jnp.float32(0.0)
    parts = split(batch, section.micro_batches)
    logprobs = jax.lax.map(lambda part: _answer_logprobs(model, params, part).logprobs, parts).reshape(-1, 2)
    reference, mask = parts.reference.reshape(-1, 2), parts.weight.reshape(-1)
    if section.objective == "kto":
        return kto_baseline(logprobs[:, 1], reference[:, 1], mask)
    return bco_baseline(*logprobs.T, *reference.T, section.beta, mask)


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "section"), donate_argnames=("state",))
def direct_step(model: Model, optimizer, section: Dpo, state: TrainState, batch: AnswerPairs, frozen=None):
    """One update: (state, metrics). All are means over the rows of the whole batch that count (Decision 7).

    frozen: the parameters that are not trained, of a model with adapters.
    """
    total = jnp.maximum(jnp.sum(batch.weight), 1.0)
    anchor = _anchor(model, section, join(frozen, state.params), batch)

    def loss_fn(params, part: AnswerPairs):
        loss, reported = _objective(section, _answer_logprobs(model, join(frozen, params), part), part, anchor)
        mean = lambda x: masked_sum(x, part.weight) / total  # noqa: E731
        return mean(loss), Aux({"loss": mean(loss)} | {name: mean(x) for name, x in reported.items()})

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, parts_of(batch, section.micro_batches))
    return state, {**aux.sums, **metrics, "anchor": anchor}
