"""The metrics of the jitted training steps, one record for each step.

A field is None if the configuration does not compute it; the step's result then has no array for it. Values are float32
scalars unless noted. `tracking.metrics.by_name` turns a record into the names that users read.
"""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientMetrics:
    """Metrics of `state.apply_gradients`.

    Attributes:
      grad_norm: the global norm of the gradients, without the loss scale.
      skipped: 1 if the update was skipped because its gradients are not finite, otherwise 0.
      loss_scale: the loss scale of this step; None without one.
      overflowed: 1 if the loss scale explains the skipped update, otherwise 0; None without a loss scale.
    """

    grad_norm: jax.Array
    skipped: jax.Array
    loss_scale: jax.Array | None = None
    overflowed: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics(GradientMetrics):
    """Metrics of every step of supervised, preference, direct and distillation training.

    Attributes:
      loss: the loss of the whole batch without the experts' load-balancing loss, in the unit of the objective.
      tokens: the number of tokens of the batch, an integer; None if the step's caller counts them.
    """

    loss: jax.Array
    tokens: jax.Array | int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LmMetrics(StepMetrics):
    """Metrics of `lm_step.lm_step`. The loss is in nats per weighted token; `tokens` counts all but padding.

    Attributes:
      load_balance: the experts' load-balancing loss without its coefficient; None for a model without experts.
    """

    load_balance: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceMetrics(StepMetrics):
    """Metrics of `preference_step.preference_step`. The loss is in nats per pair.

    Attributes:
      accuracy: the share, 0 to 1, of the pairs whose label prefers an answer that the scores order like the label;
        NaN if no label prefers an answer.
    """

    accuracy: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectMetrics(StepMetrics):
    """Metrics of `direct_step.direct_step`: the loss and the fields up to nll are means over the rows that count.

    Attributes:
      chosen_reward: the implicit reward of the better answer, beta times nats.
      rejected_reward: the implicit reward of the worse answer.
      margin: their difference.
      accuracy: the share of rows, 0 to 1, whose margin is positive.
      nll: the negative log-likelihood of the better answer, in nats per token.
      anchor: the sum of the objectives' anchors, 0 for objectives without one.
      undecided: 1 if the update was skipped because no label of the batch prefers an answer, otherwise 0.
    """

    chosen_reward: jax.Array
    rejected_reward: jax.Array
    margin: jax.Array
    accuracy: jax.Array
    nll: jax.Array
    anchor: jax.Array
    undecided: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineDirectMetrics:
    """Metrics of one iteration of online direct preference optimisation.

    Attributes:
      decided: the number of pairs whose label prefers an answer.
      kl: an estimate of the policy's KL to its start, in nats per answer.
      length: the mean number of tokens of an answer.
      eos_rate: the share of the answers, 0 to 1, that end with a stop token.
      tokens: the number of tokens of all answers.
      update: means over the updates of the iteration; those of the loss and of the other values of pairs only over the updates
        that have pairs to train on.
    """

    decided: float
    kl: float
    length: float
    eos_rate: float
    tokens: int
    update: DirectMetrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillMetrics(StepMetrics):
    """Metrics of `preference_step.distill_step`.

    Attributes:
      agreement: the share of pairs, 0 to 1, that teacher and student order the same way.
    """

    agreement: jax.Array
