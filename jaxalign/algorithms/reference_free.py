"""Preference objectives that need no reference: CPO, ORPO and SimPO.

Each loss has one value per row, as in `direct_preference`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.answer_inputs import PreferenceStats, counted, pair_inputs, reward_stats, weigh
from jaxalign.algorithms.direct_preference import dpo, logistic
from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_positive_scalar,
    require_range,
    require_same_shape,
    require_scalar,
)


def cpo(
    chosen_logprobs: Any,
    rejected_logprobs: Any,
    beta: Any = 0.1,
    label: Any = 1.0,
    nll: Any = None,
    nll_coef: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Contrastive preference optimisation (CPO, Xu et al. 2024, arXiv 2401.08417, eq. 4): no reference, plus an SFT term.

        loss = -log sigmoid(beta (chosen - rejected)) + nll_coef * nll

    The first term is `dpo` without a reference. For other kinds (hinge, ipo) call `dpo` directly and add the same `nll`.

    Args:
      chosen_logprobs: real [B], the summed log-probabilities of the first response's tokens, under the policy.
      rejected_logprobs: real [B], of the second.
      beta: scalar above 0.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`.
      nll: real [B], `sft_loss` of the summed log-probabilities (the paper) or of the mean ones (common implementations);
        None for the first term only.
      nll_coef: scalar, not negative; 1 in the paper.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the log-probabilities.

    Raises:
      ValueError: a shape differs, or a label or a setting is outside its range.
    """
    loss, stats = dpo(chosen_logprobs, rejected_logprobs, None, None, beta, label, mask=mask)
    return _add_nll(loss, nll, nll_coef, mask), stats


def orpo(
    chosen_avg_logprobs: Any,
    rejected_avg_logprobs: Any,
    beta: Any = 1.0,
    label: Any = 1.0,
    nll: Any = None,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Odds ratio preference optimisation (ORPO, Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7): SFT plus a penalty.

        odds(p) = p / (1 - p),    p = exp(mean log-probability per token)
        loss = nll + beta * (-log sigmoid(log odds(chosen) - log odds(rejected)))

    With the defaults this is the odds term only. ORPO itself uses beta = .1 (lambda in the paper) and
    nll = sft_loss(chosen_avg_logprobs, rejected_avg_logprobs, label, mask); without it nothing anchors the odds term.

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens, at most 0. Odds are capped at
        1 / epsilon of the dtype, since a probability of 1 has infinite odds.
      rejected_avg_logprobs: real [B], of the second.
      beta: scalar above 0, the odds term's weight.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`.
      nll: real [B], or None for the odds term only.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are the log odds, and the margins their difference.

    Raises:
      ValueError: a shape differs, a label or a setting is outside its range, or a log-probability is above 0.
    """
    require_positive_scalar("beta", beta)
    selected, label, pair, _ = pair_inputs(chosen_avg_logprobs, rejected_avg_logprobs, None, None, label, mask, "avg_")
    for name, x in (("chosen_avg_logprobs", chosen_avg_logprobs), ("rejected_avg_logprobs", rejected_avg_logprobs)):
        require_range(name, counted(x, mask), -jnp.inf, 0, tolerance=1e-6)
    first, second = (_log_odds(x) for x in pair)
    odds = weigh(label, logistic, (first, second), 1) + weigh(1 - label, logistic, (second, first), 1)
    loss = _add_nll(jnp.where(selected, beta * odds, 0), nll, 1.0, mask)
    return loss, reward_stats(*(jnp.where(selected, x, 0) for x in (first, second)))


def simpo(
    chosen_avg_logprobs: Any,
    rejected_avg_logprobs: Any,
    beta: Any = 2.0,
    gamma: Any = 0.5,
    label: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, PreferenceStats]:
    """Simple preference optimisation (SimPO, Meng et al. 2024, arXiv 2405.14734, eq. 6): mean log-probabilities and a margin.

        loss = -log sigmoid(beta (chosen - rejected) - gamma)

    Args:
      chosen_avg_logprobs: real [B], the mean log-probability of the first response's tokens, under the policy.
      rejected_avg_logprobs: real [B], of the second.
      beta: scalar above 0.
      gamma: scalar, not negative, in units of the reward; some implementations take gamma / beta instead.
      label: scalar or real [B], in [0, 1]: the probability that the first is better; soft labels as in `dpo`, so the margin
        applies in both directions.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, stats): loss float32 [B]; the rewards are beta times the mean log-probabilities, the margins without gamma.

    Raises:
      ValueError: a shape differs, or a label or a setting is outside its range.
    """
    require_positive_scalar("beta", beta)
    require_scalar("gamma", gamma, 0)
    selected, label, pair, _ = pair_inputs(chosen_avg_logprobs, rejected_avg_logprobs, None, None, label, mask, "avg_")
    first, second = (beta * x for x in pair)
    loss = weigh(label, logistic, (first - gamma, second), 1) + weigh(1 - label, logistic, (second - gamma, first), 1)
    return jnp.where(selected, loss, 0), reward_stats(first, second)


def _log_odds(logprobs: jax.Array) -> jax.Array:
    logprobs = jnp.minimum(logprobs, -jnp.finfo(logprobs.dtype).eps)
    # Each form of log(1 - exp(x)) is accurate on one side of -log 2; the inner `where`s keep the other form's gradient finite.
    near = logprobs > -0.6931
    log_rest = jnp.where(
        near,
        jnp.log(-jnp.expm1(jnp.where(near, logprobs, -0.1))),
        jnp.log1p(-jnp.exp(jnp.where(near, -1.0, logprobs))),
    )
    return logprobs - log_rest


def _add_nll(loss: jax.Array, nll: Any, coef: Any, mask: Any) -> jax.Array:
    """The loss with the weighted NLL of the counted rows; `loss` itself without an NLL."""
    require_scalar("nll_coef", coef, 0)
    if nll is None:
        return loss
    require_same_shape(loss=loss, nll=nll)
    nll = as_float("nll", nll)
    return loss + coef * (nll if mask is None else jnp.where(is_set(mask), nll, 0))
