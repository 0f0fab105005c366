"""The jitted step that trains a smaller reward model to predict the scores of a larger one."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms.preference_losses import bradley_terry, score_regression
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.records import ScoredPairs
from jaxalign.steps.arguments import DistillArguments
from jaxalign.steps.metrics import DistillMetrics
from jaxalign.steps.microbatch import Aux, parts_of
from jaxalign.steps.preference_step import pair_scores
from jaxalign.steps.state import TrainState, gradient_step


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
