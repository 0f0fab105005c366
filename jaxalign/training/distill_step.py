"""The jitted step by which a smaller reward model learns the scores of a larger one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry, score_regression
from jaxalign.models.model import Model
from jaxalign.records import ScoredPairs
from jaxalign.training.microbatch import Aux, parts_of
from jaxalign.training.preference_step import pair_scores
from jaxalign.training.state import TrainState, gradient_step


@functools.partial(
    jax.jit, static_argnames=("model", "optimizer", "objective", "scale", "micro_batches"), donate_argnames=("state",)
)
def distill_step(
    model: Model, optimizer, objective: str, scale: float, micro_batches: int, state: TrainState, batch: ScoredPairs
):
    """One update: (state, metrics).

    objective "regression": the mean squared error of the scores. "pairs": the mean Bradley-Terry loss of the pairs, whose
    soft label is the teacher's own probability. "both": their sum. `scale` (nats per unit of the normalised score) brings
    a difference of scores back to the teacher's log-odds. `agreement` is the share of pairs that both order alike.
    """
    rows = batch.target.shape[0]

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

    state, aux, metrics = gradient_step(model, optimizer, state, loss_fn, parts_of(batch, micro_batches))
    return state, {**aux.sums, **metrics}
