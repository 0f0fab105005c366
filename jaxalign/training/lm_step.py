"""The jitted step of next-token training (pretraining and supervised fine-tuning) on packed rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxalign.models.adapters.lora import join
from jaxalign.models.heads import counted_first
from jaxalign.models.model import Model
from jaxalign.parallel.ordered import after
from jaxalign.parallel.zigzag import context_size
from jaxalign.records import PackedBatch
from jaxalign.training.microbatch import Aux, parts_of
from jaxalign.training.state import TrainState, gradient_step


def lm_loss(model: Model, params, batch: PackedBatch, total, balance_coef: float = 0.0):
    """Summed negative log-likelihood (nats) of the weighted tokens of `batch`, divided by `total`, and balance_coef times the
    experts' load-balancing loss, weighed by the batch's share of `total`. The latter is each micro-batch's own."""
    hidden, balance = model.hidden_and_balance(params, batch.tokens, batch.positions, batch.segment_ids)
    given, used = (hidden[:, :-1], batch.tokens[:, 1:], batch.loss_mask[:, 1:]), None
    if context_size(model.sharding) == 1:  # The head works where the loss is alone.
        if model.sharding is None:
            given = tuple(x.reshape(1, -1, *x.shape[2:]) for x in given)
        used, given = counted_first(given[2], *given)
    hidden, targets, counted = given
    loss = model.weighted_nll(params, hidden, targets, counted / jnp.maximum(total, 1.0), used)
    if model.config.experts is None:
        return loss, Aux({"loss": loss})
    balance = balance * jnp.sum(counted) / jnp.maximum(total, 1.0)
    return loss + balance_coef * balance, Aux({"loss": loss, "load_balance": balance})


@functools.partial(
    jax.jit, static_argnames=("model", "optimizer", "micro_batches", "balance_coef"), donate_argnames=("state",)
)
def lm_step(
    model: Model, optimizer, micro_batches: int, state: TrainState, batch: PackedBatch, frozen=None, balance_coef: float = 0.0
):
    """One update: (state, metrics). The loss is a mean over all weighted tokens of the batch, however it is split.

    frozen: the parameters that are not trained, of a model with adapters.
    """
    total, count = jnp.sum(batch.loss_mask[:, 1:]), jnp.sum(batch.segment_ids > 0)
    batch = dataclasses.replace(batch, tokens=after(model.sharding, batch.tokens, (total, count)))
    loss_fn = lambda params, part: lm_loss(model, join(frozen, params), part, total, balance_coef)  # noqa: E731
    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, parts_of(batch, micro_batches))
    return state, {**aux.sums, **metrics, "tokens": count}


@functools.partial(jax.jit, static_argnames=("model",))
def lm_evaluate(model: Model, params, batch: PackedBatch):
    """(summed negative log-likelihood, weighted tokens) of a batch."""
    total = jnp.sum(batch.loss_mask[:, 1:])
    loss, _ = lm_loss(model, params, batch, 1.0)
    return loss, total
