"""The jitted step of next-token training (pretraining and supervised fine-tuning) on packed rows."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp

from jaxalign.models.heads import counted_first
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.ordered import after
from jaxalign.parallel.zigzag import context_size
from jaxalign.records import PackedBatch
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.metrics import LmMetrics
from jaxalign.steps.microbatch import Aux, parts_of
from jaxalign.steps.state import TrainState, gradient_step


def lm_loss(model: Model, params, batch: PackedBatch, total, balance_coef: float = 0.0):
    """(float32 []: the summed weighted negative log-likelihood of `batch` in nats, divided by `total`; an `Aux`).

    For a model with experts, the loss includes balance_coef times their load-balancing loss, which is computed within each
    micro-batch and weighted by the micro-batch's share of `total`.
    """
    hidden, balance = model.hidden_and_balance(params, batch.tokens, batch.positions, batch.segment_ids)
    given, used = (hidden[:, :-1], batch.tokens[:, 1:], batch.loss_mask[:, 1:]), None
    if context_size(model.sharding) == 1:  # The head then computes only tokens that have a loss weight.
        if model.sharding.mesh.size == 1:
            given = tuple(x.reshape(1, -1, *x.shape[2:]) for x in given)
        used, given = counted_first(given[2], *given)
    hidden, targets, counted = given
    loss = model.weighted_nll(params, hidden, targets, counted / jnp.maximum(total, 1.0), used)
    if model.config.experts is None:
        return loss, Aux({"loss": loss})
    balance = balance * jnp.sum(counted) / jnp.maximum(total, 1.0)
    return loss + balance_coef * balance, Aux({"loss": loss, "load_balance": balance})


@functools.partial(MeshProgram, donate_argnames=("state",))
def lm_step(state: TrainState, arguments: LmArguments) -> tuple[TrainState, LmMetrics]:
    """One update: (state, metrics). The loss is the weighted mean over all tokens of the batch, however the batch is split."""
    model, batch = arguments.model, arguments.batch
    chex.assert_rank(jax.tree.leaves(batch), 2)
    chex.assert_equal_shape(jax.tree.leaves(batch))
    total, count = jnp.sum(batch.loss_mask[:, 1:]), jnp.sum(batch.segment_ids > 0)
    batch = dataclasses.replace(batch, tokens=after(model.sharding, batch.tokens, (total, count)))

    def loss_fn(params, part):
        return lm_loss(model, params, part, total, arguments.balance_coef)

    parts = parts_of(batch, arguments.micro_batches)
    state, aux, gradient = gradient_step(model, arguments.optimizer, state, loss_fn, parts, arguments.frozen)
    return state, LmMetrics(**aux.sums, **vars(gradient), tokens=count)


@functools.partial(MeshProgram, static_argnames=("model",))
def lm_evaluate(model: Model, params, batch: PackedBatch):
    """(the summed weighted negative log-likelihood of a batch in nats, the sum of the tokens' weights), both float32 []."""
    total = jnp.sum(batch.loss_mask[:, 1:])
    loss, _ = lm_loss(model, params, batch, 1.0)
    return loss, total
