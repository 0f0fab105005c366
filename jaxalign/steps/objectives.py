"""The built-in direct preference objectives as functions of `DirectInputs`, and sums of objectives.

The formulas are in `jaxalign.algorithms`. The kinds of `direct_preference.dpo` are declared beside their formulas, the other
objectives here.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms import direct_preference, reference_free
from jaxalign.algorithms import kto as kto_losses
from jaxalign.algorithms.answer_inputs import PreferenceStats, reward_stats
from jaxalign.algorithms.direct_preference import sft_loss
from jaxalign.config import DPOConfig
from jaxalign.errors import UserError
from jaxalign.registry.custom import require_array, wrong_result
from jaxalign.registry.objectives import OBJECTIVES, Objective, is_custom, objectives_of


class DirectInputs(NamedTuple):
    """The inputs of a direct preference objective. All arrays are float32 [B]; rows that do not count are zeros.

    Attributes:
      first: the log-probability of the first answer under the policy. The first answer is the one that the label prefers.
      second: the same for the second answer; for objectives on single answers, this is an answer to another prompt.
      reference_first: the log-probability of the first answer under the reference; zeros without a reference.
      reference_second: the same for the second answer.
      first_tokens: the number of tokens of the first answer.
      second_tokens: the number of tokens of the second answer.
      label: the probability that the first answer is better; for single answers, 1 for a good and 0 for a bad answer.
      mask: 1 for rows that count, otherwise 0.
      anchor: float32 [], the result of the objective's anchor function over the whole batch; 0 if it has none.
      settings: the fields of `config.dpo`, such as beta.
    """

    first: jax.Array
    second: jax.Array
    reference_first: jax.Array
    reference_second: jax.Array
    first_tokens: jax.Array
    second_tokens: jax.Array
    label: jax.Array
    mask: jax.Array
    anchor: jax.Array
    settings: DPOConfig

    @property
    def first_mean(self) -> jax.Array:
        """float32 [B]: the mean log-probability of the first answer's tokens."""
        return self.first / jnp.maximum(self.first_tokens, 1)

    @property
    def second_mean(self) -> jax.Array:
        """float32 [B]: the mean log-probability of the second answer's tokens."""
        return self.second / jnp.maximum(self.second_tokens, 1)


Loss = tuple[jax.Array, PreferenceStats]


def mean_reward(inputs: DirectInputs) -> jax.Array:
    """The anchor of bco_pair: the mean implicit reward of all answers, float32 []."""
    references = inputs.reference_first, inputs.reference_second
    return direct_preference.bco_baseline(inputs.first, inputs.second, *references, inputs.settings.beta, inputs.mask)


def mismatched_kl(inputs: DirectInputs) -> jax.Array:
    """The anchor of KTO: an estimate of the policy's KL from answers to other prompts, float32 []."""
    return kto_losses.kto_baseline(inputs.second, inputs.reference_second, inputs.mask)


@OBJECTIVES.declare(
    "kto", pairs=False, anchor=mismatched_kl, summable=False, reads=("desirable_weight", "undesirable_weight")
)
def kto(inputs: DirectInputs) -> Loss:
    """KTO. The reported margin is the reward of a good answer and minus the reward of a bad answer. The chosen and rejected
    rewards are doubled, so that their means over a batch are about the means over its good and bad answers."""
    settings, label = inputs.settings, inputs.label
    loss, rewards = kto_losses.kto(
        inputs.first,
        inputs.reference_first,
        label,
        inputs.anchor,
        settings.beta,
        settings.desirable_weight,
        settings.undesirable_weight,
        inputs.mask,
    )
    margins = jnp.where(label > 0.5, rewards, -rewards)
    return loss, PreferenceStats(2 * label * rewards, 2 * (1 - label) * rewards, margins)


@OBJECTIVES.declare("orpo", summable=False, mean_rewards=True, sft_weight=1.0, reads=())
def orpo(inputs: DirectInputs) -> Loss:
    """The odds-ratio term of ORPO; its likelihood term is `dpo.sft_weight`."""
    return reference_free.orpo(
        inputs.first_mean, inputs.second_mean, inputs.settings.beta, inputs.label, mask=inputs.mask
    )


@OBJECTIVES.declare("cpo", summable=False, sft_weight=1.0, reads=())
def cpo(inputs: DirectInputs) -> Loss:
    """The preference term of CPO; its likelihood term is `dpo.sft_weight`."""
    return reference_free.cpo(inputs.first, inputs.second, inputs.settings.beta, inputs.label, mask=inputs.mask)


@OBJECTIVES.declare("simpo", summable=False, mean_rewards=True, reads=("margin",))
def simpo(inputs: DirectInputs) -> Loss:
    """SimPO with the target margin `dpo.margin`."""
    settings = inputs.settings
    return reference_free.simpo(
        inputs.first_mean, inputs.second_mean, settings.beta, settings.margin, inputs.label, inputs.mask
    )


def anchors(inputs: DirectInputs) -> tuple[jax.Array, ...]:
    """The anchor of each objective named in the settings, over the whole batch; 0 for an objective without one."""
    inputs, values = _masked(inputs), []
    for objective in objectives_of(inputs.settings.objective):
        function = objective.load("anchor")
        if function is None:
            values.append(jnp.float32(0.0))
            continue
        anchor = jnp.asarray(function(inputs))
        if anchor.shape != () or not jnp.issubdtype(anchor.dtype, jnp.floating):
            raise UserError(f"the anchor of objective {objective.name!r} is {anchor.dtype} {list(anchor.shape)}; a float32 "
                            "scalar is expected")
        values.append(jax.lax.stop_gradient(anchor))
    return tuple(values)


def objective_loss(inputs: DirectInputs, anchored: tuple[jax.Array, ...]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of the objective, or sum of objectives, that the settings name, including the likelihood term.

    Args:
      inputs: the inputs for a batch or a micro-batch.
      anchored: the `anchors` of the whole batch.

    Returns:
      (loss, reported): float32 [B], and by name the float32 [B] chosen_reward, rejected_reward, margin, accuracy and nll (of
      the better answer, in nats per token). Rows that do not count have loss 0.

    Raises:
      UserError: an objective returns anything other than a loss [B], with or without its statistics.
    """
    settings = inputs.settings
    objectives, sft_weight = objectives_of(settings.objective), _sft_weight(settings)
    inputs = _masked(inputs)
    nll = sft_loss(inputs.first_mean, inputs.second_mean, 1.0, inputs.mask)
    if len(objectives) == 1:
        loss, stats = _evaluate(objectives[0], inputs._replace(anchor=anchored[0]))
        nll = nll if objectives[0].pairs else nll * inputs.label  # Bad answers must not be imitated.
    else:
        loss, stats = jnp.zeros_like(inputs.first), _implicit_rewards(inputs)
        weights = settings.weights or (1.0,) * len(objectives)
        for objective, anchor, weight in zip(objectives, anchored, weights, strict=True):
            loss = loss + weight * _evaluate(objective, inputs._replace(anchor=anchor))[0]
    reported = {
        "chosen_reward": stats.chosen_rewards,
        "rejected_reward": stats.rejected_rewards,
        "margin": stats.margins,
        "accuracy": (stats.margins > 0).astype(jnp.float32),
        "nll": nll,
    }
    return loss + sft_weight * nll, reported


def _sft_weight(settings: DPOConfig) -> float:
    """The weight of the likelihood term: the config's, or that of a single objective."""
    objectives = objectives_of(settings.objective)
    own = objectives[0].sft_weight if len(objectives) == 1 else 0.0
    return own if settings.sft_weight is None else settings.sft_weight


def learns_from_ties(settings: DPOConfig) -> bool:
    """Whether a pair with label 0.5 teaches something: the likelihood of its first answer, or what a custom objective reads in
    it. For the other objectives its gradient at the reference is 0 up to rounding."""
    return bool(_sft_weight(settings)) or is_custom(settings.objective)


def _masked(inputs: DirectInputs) -> DirectInputs:
    """The inputs with zeros in rows that do not count, so that these rows affect neither the loss nor its gradient."""
    *rows, anchor, settings = inputs
    chex.assert_equal_shape(rows)
    selected = inputs.mask > 0
    return DirectInputs(*(jnp.where(selected, x, 0) for x in rows), anchor, settings)


def _implicit_rewards(inputs: DirectInputs) -> PreferenceStats:
    beta, references = inputs.settings.beta, (inputs.reference_first, inputs.reference_second)
    first, second = (x - jax.lax.stop_gradient(y) for x, y in zip((inputs.first, inputs.second), references, strict=True))
    return reward_stats(beta * first, beta * second)


def _dpo(kind: str, inputs: DirectInputs) -> Loss:
    return direct_preference.dpo(
        inputs.first,
        inputs.second,
        inputs.reference_first,
        inputs.reference_second,
        inputs.settings.beta,
        inputs.label,
        kind,
        inputs.settings.label_smoothing,
        inputs.first_tokens,
        inputs.second_tokens,
        inputs.mask,
        inputs.anchor,
    )


def _evaluate(objective: Objective, inputs: DirectInputs) -> Loss:
    """The objective's checked loss, 0 in rows that do not count, and its statistics."""
    result = _dpo(objective.name, inputs) if objective.dpo_kind else objective.load()(inputs)
    loss, stats = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    stats = _implicit_rewards(inputs) if stats is None else stats
    name = f"objective {objective.name!r}"
    if not isinstance(stats, PreferenceStats):
        raise wrong_result(name, f"statistics of type {type(stats).__name__}", "a loss without statistics, or with a "
                           "jaxalign.algorithms.answer_inputs.PreferenceStats,")
    for part, values in {"a loss": loss, **stats._asdict()}.items():
        require_array(name, part, values, inputs.first.shape, any_float=True)
    return jnp.where(inputs.mask > 0, loss, 0), stats
