"""The metrics of the jitted training steps, one record for each step.

A field is None where a configuration does not compute it, which leaves no array in the step's result. Values are float32
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
      skipped: 1 where the gradients are not finite and the update was skipped, otherwise 0.
      loss_scale: the factor of the loss in this step; None without a loss scale.
      overflowed: 1 where the loss scale explains the skipped update, otherwise 0; None without a loss scale.
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
      loss: the loss of the whole batch, without the experts' load-balancing loss; its unit is that of the objective.
      tokens: the number of tokens of the batch, an integer; None where the step does not count them and the caller adds it.
    """

    loss: jax.Array
    tokens: jax.Array | int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LmMetrics(StepMetrics):
    """Metrics of `lm_step.lm_step`. The loss is in nats per weighted token; `tokens` counts all that are not padding.

    Attributes:
      load_balance: the experts' load-balancing loss without its coefficient; None for a model without experts.
    """

    load_balance: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceMetrics(StepMetrics):
    """Metrics of `preference_step.preference_step`. The loss is in nats per pair.

    Attributes:
      accuracy: the share of decided pairs, 0 to 1, whose scores agree with the label.
    """

    accuracy: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectMetrics(StepMetrics):
    """Metrics of `direct_step.direct_step`, means over the rows of the whole batch that count.

    Attributes:
      chosen_reward: the implicit reward of the better answer, in nats times beta.
      rejected_reward: that of the worse answer.
      margin: the difference of the two.
      accuracy: the share of rows, 0 to 1, whose margin is positive.
      nll: the negative log-likelihood of the better answer, in nats per token.
      anchor: the sum of the objectives' anchors, 0 for objectives without one.
    """

    chosen_reward: jax.Array
    rejected_reward: jax.Array
    margin: jax.Array
    accuracy: jax.Array
    nll: jax.Array
    anchor: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineDirectMetrics:
    """Metrics of one iteration of online direct preference optimisation.

    Attributes:
      decided: the number of pairs whose label prefers one answer.
      kl: the mean over the answers of the log-probability under the policy minus that under the start, in nats.
      length: mean tokens of an answer.
      tokens: the number of tokens of all answers.
      update: means over the updates of the iteration.
    """

    decided: float
    kl: float
    length: float
    tokens: int
    update: DirectMetrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillMetrics(StepMetrics):
    """Metrics of `distill_step.distill_step`.

    Attributes:
      agreement: the share of pairs, 0 to 1, that teacher and student order alike.
    """

    agreement: jax.Array
