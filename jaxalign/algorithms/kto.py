"""Kahneman-Tversky optimisation: single responses, each judged good or bad, instead of pairs (arXiv 2402.01306).

Each loss has one value per row, as in `direct_preference`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.answer_inputs import single_inputs
from jaxalign.algorithms.guards import as_float, require_positive_scalar, require_scalar, require_shape
from jaxalign.algorithms.masked import masked_mean


def kto(
    policy_logprobs: Any,
    ref_logprobs: Any,
    desirable: Any,
    kl: Any,
    beta: Any = 0.1,
    desirable_weight: Any = 1.0,
    undesirable_weight: Any = 1.0,
    mask: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Kahneman-Tversky optimisation of single responses (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

        loss = desirable_weight (1 - sigmoid(beta (a - kl)))      where desirable, a = policy_logprobs - ref_logprobs
        loss = undesirable_weight (1 - sigmoid(beta (kl - a)))    where undesirable

    A value of `desirable` between 0 and 1 mixes the two.

    Args:
      policy_logprobs: real [B], the summed log-probabilities of a response's tokens, under the policy.
      ref_logprobs: real [B], under the reference; no gradient flows into it. None: 0.
      desirable: bool or real [B], in [0, 1]: whether the response is good, or the probability that it is.
      kl: scalar, the reference point z0 (`kto_baseline`), over the whole batch; no gradient flows into it.
      beta: scalar above 0.
      desirable_weight: scalar, not negative. The paper recommends weights such that (desirable_weight * number of desirable
        responses) / (undesirable_weight * number of undesirable ones) is in [1, 3/2].
      undesirable_weight: scalar, not negative.
      mask: bool, int or float [B]; 0 for padding rows. None counts all.

    Returns:
      (loss, rewards): float32 [B] both; the rewards are beta a, without gradient.

    Raises:
      ValueError: a shape differs, or `desirable` or a setting is outside its range.
    """
    require_positive_scalar("beta", beta)
    for name, x in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        require_scalar(name, x, 0)
    require_shape("kl", kl, "scalar", ())
    selected, desirable, log_ratios = single_inputs(policy_logprobs, ref_logprobs, mask, desirable)
    gain = beta * (log_ratios - jax.lax.stop_gradient(as_float("kl", kl)))
    good, bad = desirable_weight * jax.nn.sigmoid(-gain), undesirable_weight * jax.nn.sigmoid(gain)
    loss = jnp.where(selected, desirable * good + (1 - desirable) * bad, 0)
    return loss, jax.lax.stop_gradient(beta * log_ratios)


def kto_baseline(policy_logprobs: Any, ref_logprobs: Any, mask: Any = None) -> jax.Array:
    """KTO's reference point: max(0, mean of log pi - log ref over mismatched pairs), an estimate of KL(pi || ref).

    A mismatched pair is a row's prompt with another row's response, usually that of the next row; the last row takes the
    first row's response. Call it on the whole batch: averaging over micro-batches, each clipped at 0, differs.

    Args:
      policy_logprobs: real [B], the summed log-probabilities of the other response's tokens after this row's prompt.
      ref_logprobs: real [B], under the reference. None: 0.
      mask: bool, int or float [B]; 0 for padding rows. None counts all. Infinite log-ratios are left out.

    Returns:
      float32 scalar without gradient, in nats, never negative; 0 where no row counts.

    Raises:
      ValueError: a shape differs.
    """
    selected, _, log_ratios = single_inputs(policy_logprobs, ref_logprobs, mask, 1.0)
    return jax.lax.stop_gradient(jnp.maximum(masked_mean(log_ratios, selected & ~jnp.isinf(log_ratios)), 0))
