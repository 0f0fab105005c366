"""KL(policy || reference): estimates from samples, the exact value, both as losses, and controllers of the coefficient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_choice,
    require_positive,
    require_range,
    require_same_shape,
    require_shape,
    shape_of,
)
from jaxalign.algorithms.importance import LARGE

ESTIMATORS = ("k1", "k2", "k3", "abs")
LOSSES = (*ESTIMATORS, "full")
CONTROLLERS = ("fixed", "adaptive")

# The proportional error of the adaptive controller is clipped to this (Ziegler et al. 2019, section 2.2).
_ERROR_CLIP = 0.2


def kl_penalty(logprobs: Any, reference_logprobs: Any, kind: str = "k1") -> jax.Array:
    """Per-token estimate of KL(policy || reference), with d = logprobs - reference_logprobs at the sampled tokens.

    "k1" d: unbiased, may be negative; "k2" d^2 / 2: biased, low variance; "k3" exp(-d) - 1 + d: unbiased and never
    negative; "abs" |d|: a penalty, not an estimate. Source: Schulman 2020, "Approximating KL divergence".

    Args:
      logprobs: real, any shape, usually [B, N]; log-probabilities under the policy that sampled them.
      reference_logprobs: the same shape, under the reference.
      kind: one of `ESTIMATORS`.

    Returns:
      float32 of that shape.

    Raises:
      ValueError: the shapes differ, or the kind is unknown.
    """
    require_choice("kind", kind, ESTIMATORS)
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = as_float("logprobs", logprobs) - as_float("reference_logprobs", reference_logprobs)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        # expm1, because exp(-d) - 1 cancels in float32 for small d.
        # inf - inf is NaN; -inf is replaced because the limit of the estimate is inf.
        difference = jnp.where(jnp.isneginf(difference), -LARGE, difference)
        return jnp.expm1(-difference) + difference
    return jnp.abs(difference)


def full_kl(logits: Any, reference_logits: Any) -> jax.Array:
    """KL(policy || reference) summed over the vocabulary; for small vocabularies and for checks.

    Args:
      logits: real [..., V]; unnormalised, or log-probabilities. -inf is allowed.
      reference_logits: real [..., V].

    Returns:
      float32 [...], in nats.

    Raises:
      ValueError: the shapes differ.
    """
    require_same_shape(logits=logits, reference_logits=reference_logits)
    logp = jax.nn.log_softmax(as_float("logits", logits))
    reference_logp = jax.nn.log_softmax(as_float("reference_logits", reference_logits))
    # A token of probability 0 contributes nothing, but 0 * -inf would be NaN.
    possible = jnp.isfinite(logp)
    return jnp.sum(jnp.where(possible, jnp.exp(logp) * jnp.where(possible, logp - reference_logp, 0), 0), axis=-1)


def kl_loss(logprobs: Any, reference_logprobs: Any, kind: str = "k2", mask: Any = None) -> jax.Array:
    """The KL as a loss to add to the policy loss: per token, differentiable, and safe under a mask.

    In a loss the gradient of an estimator matters, not its value. With d = logprobs - reference_logprobs, and tokens sampled
    from the policy in training, the gradients and their expectations are:

        "k1"    grad log pi                 0: only noise, no pull towards the reference
        "k2"    d grad log pi               the gradient of KL(policy || reference)
        "k3"    (1 - exp(-d)) grad log pi   the gradient of KL(reference || policy), the other direction
        "abs"   sign(d) grad log pi         not the gradient of a KL, but bounded and towards the reference
        "full"  summed over the vocabulary  the gradient of KL(policy || reference), without noise

    In the reward (`kl_penalty`) the value matters, and k1 is unbiased. For samples from an older policy the expectations hold
    only with importance weights (`importance.importance_weights`).

    Args:
      logprobs: real, any shape, usually [B, N]; at the sampled tokens, under the policy in training. For "full"
        [..., V]: logits, or log-probabilities of the whole vocabulary.
      reference_logprobs: the same shape, under the reference; no gradient flows into it.
      kind: one of `LOSSES`.
      mask: bool, int or float of the shape of the result, or None. Masked tokens have loss 0 and no gradient, whatever
        their values.

    Returns:
      float32 of the shape of `logprobs`, for "full" without its last axis; 0 at masked tokens.

    Raises:
      ValueError: the shapes differ, or the kind is unknown.
    """
    require_choice("kind", kind, LOSSES)
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    shape = shape_of("logprobs", logprobs)[:-1] if kind == "full" else shape_of("logprobs", logprobs)
    mask = jnp.ones(shape, bool) if mask is None else is_set(mask)
    require_shape("mask", mask, "the shape of the loss", shape)
    # Masked before the estimator: a 0 cotangent times an infinite derivative is NaN.
    chosen = mask[..., None] if kind == "full" else mask
    logprobs = jnp.where(chosen, as_float("logprobs", logprobs), 0)
    reference = jnp.where(chosen, as_float("reference_logprobs", reference_logprobs), 0)
    reference = jax.lax.stop_gradient(reference)
    return full_kl(logprobs, reference) if kind == "full" else kl_penalty(logprobs, reference, kind)


def update_kl_coef(
    coef: Any, measured_kl: Any, target: Any, horizon: Any, num_samples: Any, kind: str = "adaptive"
) -> jax.Array:
    """The KL coefficient for the next step.

    "fixed" returns it unchanged. "adaptive" is the log-space proportional controller of Ziegler et al. 2019 (arXiv 1909.08593):
    coef * (1 + clip(measured_kl / target - 1, -0.2, 0.2) * num_samples / horizon).

    Args:
      coef: scalar, the current coefficient.
      measured_kl: scalar, mean nats per response.
      target: scalar above 0, the target in nats per response.
      horizon: scalar above 0, in responses; a larger horizon reacts more slowly.
      num_samples: scalar, responses seen since the last update; below 5 * horizon, so that the coefficient stays above 0.
      kind: one of `CONTROLLERS`.

    Returns:
      float32 scalar.

    Raises:
      ValueError: an unknown kind, an argument that is not a scalar, or an adaptive setting outside its range.
    """
    require_choice("kind", kind, CONTROLLERS)
    require_shape("coef", coef, "scalar", ())
    coef = as_float("coef", coef)
    if kind == "fixed":
        return coef
    settings = {"measured_kl": measured_kl, "target": target, "horizon": horizon, "num_samples": num_samples}
    for name, value in settings.items():
        require_shape(name, value, "scalar", ())
    require_positive("target", target)
    require_positive("horizon", horizon)
    require_range("num_samples", num_samples, 0)
    require_positive("5 * horizon - num_samples", horizon / _ERROR_CLIP - num_samples)
    error = jnp.clip(as_float("measured_kl", measured_kl) / target - 1, -_ERROR_CLIP, _ERROR_CLIP)
    return coef * (1 + error * num_samples / horizon)
