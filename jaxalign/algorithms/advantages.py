"""Advantages and returns per step: GAE, lambda-returns, discounted returns, V-trace, REINFORCE and REINFORCE++.

All of them skip masked steps (padding, or tokens in a response that the policy did not generate): the step before a masked
step uses the next unmasked step instead and is discounted once. Values at masked positions are not read. Each function is
one backward scan over T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.groups import grpo
from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_positive_scalar,
    require_range,
    require_same_shape,
    require_scalar,
    require_shape,
    shape_of,
)
from jaxalign.algorithms.importance import LOG_RATIO_LIMIT
from jaxalign.algorithms.masked import masked_sum, whiten


def gae(
    rewards: Any, values: Any, mask: Any, gamma: Any = 1.0, lam: Any = 0.95, bootstrap_value: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16) and its lambda-returns.

        delta_t = r_t + gamma_t V_{t+1} - V_t,    A_t = delta_t + gamma_t lam A_{t+1},    R_t = A_t + V_t

    Args:
      rewards: real [B, T].
      values: real [B, T], the critic's V_t before step t.
      mask: bool, int or float [B, T]; not 0 where the policy acted.
      gamma: scalar in [0, 1], or [B, T]: the discount from step t to the next, 0 where an episode ends.
      lam: scalar in [0, 1].
      bootstrap_value: real [B], the value after the last step of a row that was cut off; None for rows that ended: 0.

    Returns:
      (advantages, returns): float32 [B, T], 0 at masked steps.

    Raises:
      ValueError: a shape differs, or gamma or lam is outside [0, 1].
    """
    selected, discounts, last, rewards, values = _prepare(mask, gamma, bootstrap_value, rewards=rewards, values=values)
    require_scalar("lam", lam, 0, 1)
    lam = jnp.asarray(lam, last.dtype)

    def step(following: tuple[jax.Array, jax.Array], reward: jax.Array, value: jax.Array, discount: jax.Array):
        next_value, next_advantage = following
        advantage = reward + discount * next_value - value + discount * lam * next_advantage
        return (value, advantage), advantage

    advantages = _scan_back(step, (last, jnp.zeros_like(last)), selected, rewards, values, discounts)
    return advantages, jnp.where(selected, advantages + values, 0)


def discounted_returns(rewards: Any, mask: Any, gamma: Any = 1.0, bootstrap_value: Any = None) -> jax.Array:
    """Discounted rewards-to-go: R_t = r_t + gamma_t R_{t+1}, with R = bootstrap_value after the last step.

    Args:
      rewards: real [B, T].
      mask: bool, int or float [B, T]; not 0 where the policy acted.
      gamma: scalar in [0, 1], or [B, T]: the discount from step t to the next, 0 where an episode ends.
      bootstrap_value: real [B], the value after the last step of a row that was cut off; None for rows that ended: 0.

    Returns:
      float32 [B, T], 0 at masked steps.

    Raises:
      ValueError: a shape differs, or gamma is outside [0, 1].
    """
    selected, discounts, last, rewards = _prepare(mask, gamma, bootstrap_value, rewards=rewards)

    def step(following: jax.Array, reward: jax.Array, discount: jax.Array):
        now = reward + discount * following
        return now, now

    return _scan_back(step, last, selected, rewards, discounts)


def lambda_returns(rewards: Any, next_values: Any, mask: Any, gamma: Any = 1.0, lam: Any = 0.95) -> jax.Array:
    """Lambda-weighted mixtures of all n-step returns (Sutton and Barto 2018, section 12.1), computed recursively.

        R_t = r_t + gamma_t ((1 - lam) V_{t+1} + lam R_{t+1}),    where at the last step R_{t+1} = V_{t+1}

    `gae` computes the same returns from the values before each step.

    Args:
      rewards: real [B, T].
      next_values: real [B, T], V_{t+1}: the critic's value after step t. If masked steps follow step t, it is the value of
        the next unmasked step. At the last step it is 0 if the row ended, or the bootstrap value if the row was cut off.
      mask: bool, int or float [B, T]; not 0 where the policy acted.
      gamma: scalar in [0, 1], or [B, T]: the discount from step t to the next, 0 where an episode ends.
      lam: scalar in [0, 1]. 0 gives one-step returns, 1 discounted ones.

    Returns:
      float32 [B, T], 0 at masked steps.

    Raises:
      ValueError: a shape differs, or gamma or lam is outside [0, 1].
    """
    selected, discounts, last, rewards, next_values = _prepare(mask, gamma, None, rewards=rewards, next_values=next_values)
    require_scalar("lam", lam, 0, 1)
    lam = jnp.asarray(lam, last.dtype)

    def step(following: tuple[jax.Array, jax.Array], reward: jax.Array, next_value: jax.Array, discount: jax.Array):
        next_return, is_last = following
        # Padding may follow the last unmasked step, so only the scan can tell which step that is.
        next_return = jnp.where(is_last, next_value, next_return)
        now = reward + discount * ((1 - lam) * next_value + lam * next_return)
        return (now, jnp.zeros_like(is_last)), now

    return _scan_back(step, (last, jnp.ones_like(last, bool)), selected, rewards, next_values, discounts)


class VTrace(NamedTuple):
    """The result of `vtrace`; each array is float32 [B, T], 0 at masked steps.

    Attributes:
      targets: v_t, the critic's regression targets.
      advantages: A_t, for the policy gradient.
    """

    targets: jax.Array
    advantages: jax.Array


def vtrace(
    rewards: Any,
    values: Any,
    log_ratios: Any,
    mask: Any,
    gamma: Any = 1.0,
    lam: Any = 1.0,
    rho_clip: Any = 1.0,
    c_clip: Any = 1.0,
    pg_rho_clip: Any = 1.0,
    bootstrap_value: Any = None,
) -> VTrace:
    """Off-policy targets and advantages with truncated importance weights (Espeholt et al. 2018, arXiv 1802.01561, eq. 1).

        rho_t = min(rho_clip, ratio_t),    c_t = lam min(c_clip, ratio_t),    delta_t = rho_t (r_t + gamma_t V_{t+1} - V_t)
        v_t = V_t + delta_t + gamma_t c_t (v_{t+1} - V_{t+1})
        A_t = min(pg_rho_clip, ratio_t) (r_t + gamma_t (V_{t+1} + lam (v_{t+1} - V_{t+1})) - V_t)

    With lam = 1 the advantage is the paper's, which uses v_{t+1} as the next value. The mixture of v_{t+1} and V_{t+1} for
    lam < 1 makes the advantage equal to that of `gae` when all ratios are 1.

    Args:
      rewards: real [B, T].
      values: real [B, T], the critic's V_t before step t.
      log_ratios: real [B, T], log-probability of the action under the policy in training minus that under the policy that
        sampled it; no gradient flows into it.
      mask: bool, int or float [B, T]; not 0 where the policy acted.
      gamma: scalar in [0, 1], or [B, T]: the discount from step t to the next, 0 where an episode ends.
      lam: scalar in [0, 1].
      rho_clip: scalar above 0: determines which policy's value is learned (inf: that of the policy in training). Ratios never
        exceed e^60, and products of ratios the largest number of the dtype.
      c_clip: scalar above 0, at most `rho_clip` in the paper: limits how far back an error propagates.
      pg_rho_clip: scalar above 0.
      bootstrap_value: real [B], the value after the last step of a row that was cut off; None for rows that ended: 0.

    Returns:
      A `VTrace`.

    Raises:
      ValueError: a shape differs, gamma or lam is outside [0, 1], or a clip is not above 0.
    """
    selected, discounts, last, rewards, values, log_ratios = _prepare(
        mask, gamma, bootstrap_value, rewards=rewards, values=values, log_ratios=log_ratios
    )
    require_scalar("lam", lam, 0, 1)
    lam = jnp.asarray(lam, last.dtype)
    for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip), ("pg_rho_clip", pg_rho_clip)):
        require_positive_scalar(name, clip)
    ratios = jnp.exp(jnp.minimum(jax.lax.stop_gradient(log_ratios), LOG_RATIO_LIMIT))
    largest = jnp.finfo(last.dtype).max
    rho, trace, pg_rho = (jnp.minimum(ratios, jnp.asarray(x, ratios.dtype)) for x in (rho_clip, c_clip, pg_rho_clip))

    def step(following: tuple[jax.Array, jax.Array], *now: jax.Array):
        next_value, next_error = following
        reward, value, discount, rho, trace, pg_rho = now
        error = rho * (reward + discount * next_value - value) + discount * lam * trace * next_error
        advantage = pg_rho * (reward + discount * (next_value + lam * next_error) - value)
        # Products of unclipped ratios overflow, and the difference of two infinite errors is NaN.
        error, advantage = (jnp.clip(x, -largest, largest) for x in (error, advantage))
        return (value, error), (value + error, advantage)

    start = last, jnp.zeros_like(last)
    return VTrace(*_scan_back(step, start, selected, rewards, values, discounts, rho, trace, pg_rho))


def reinforce_baseline(
    rewards: Any, values: Any, mask: Any, gamma: Any = 1.0, bootstrap_value: Any = None
) -> tuple[jax.Array, jax.Array]:
    """REINFORCE with a learned baseline: discounted returns minus the critic's values (Williams 1992).

    Equals `gae` with lam = 1, but avoids the rounding errors of summing TD errors.

    Args:
      rewards: real [B, T].
      values: real [B, T], the baseline at step t; it must not depend on the policy's action at t.
      mask: bool, int or float [B, T]; not 0 where the policy acted.
      gamma: scalar in [0, 1], or [B, T]: the discount from step t to the next, 0 where an episode ends.
      bootstrap_value: real [B], the value after the last step of a row that was cut off; None for rows that ended: 0.

    Returns:
      (advantages, returns): float32 [B, T], 0 at masked steps; the baseline is regressed on the returns.

    Raises:
      ValueError: a shape differs, or gamma is outside [0, 1].
    """
    require_same_shape(rewards=rewards, values=values, mask=mask)
    returns = discounted_returns(rewards, mask, gamma, bootstrap_value)
    return jnp.where(is_set(mask), returns - as_float("values", values), 0), returns


def reinforce_plus_plus(rewards: Any, mask: Any, gamma: Any = 1.0, group_size: int | None = None) -> jax.Array:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): discounted returns, whitened over all tokens of the batch.

    No critic. Call it on the whole batch, before it is split: the mean and the (biased) variance are global, unlike the
    per-group ones of `groups.grpo`.

    With `group_size` (the variant with baseline) the group's mean total reward is first subtracted from the reward of each
    row's last token, so that hard and easy prompts enter the whitening at the same level. If the rewards include a KL
    penalty, so do the totals. To subtract the mean of the scores only, centre them with
    `groups.grpo(scores, group_size, scale="none")` before `rewards.shape_rewards`, and leave `group_size` None here.

    Args:
      rewards: real [B, T]: -kl_coef * kl on each token, plus the score on the last one (`rewards.shape_rewards`).
      mask: bool, int or float [B, T]; not 0 where the policy acted. A row without tokens is left out of its group.
      gamma: scalar in [0, 1], or [B, T].
      group_size: responses to one prompt, in contiguous rows, at least 2; None for no baseline.

    Returns:
      float32 [B, T], 0 at masked steps.

    Raises:
      ValueError: a shape differs, gamma is outside [0, 1], the rows do not divide into groups of `group_size`, or
        `group_size` is below 2.
    """
    require_same_shape(rewards=rewards, mask=mask)
    require_shape("rewards", rewards, "[B, T]", (None, None))
    selected = is_set(mask)
    if group_size is not None:
        totals = masked_sum(rewards, selected, axis=1)
        centred = grpo(totals, group_size, scale="none", mask=jnp.any(selected, axis=1))
        tokens_left = jnp.cumsum(selected[:, ::-1], axis=1)[:, ::-1]
        is_last = selected & (tokens_left == 1)
        rewards = as_float("rewards", rewards) + jnp.where(is_last, (centred - totals)[:, None], 0)
    return whiten(discounted_returns(rewards, selected, gamma), selected)


def _prepare(mask: Any, gamma: Any, bootstrap_value: Any, **arrays: Any) -> tuple[jax.Array, ...]:
    """Checks and masks the arguments. -> (selected, discounts, value after the last step, *arrays), 0 where masked."""
    require_same_shape(**arrays, mask=mask)
    require_shape(next(iter(arrays)), mask, "[B, T]", (None, None))
    batch, length = shape_of("mask", mask)
    if shape_of("gamma", gamma):
        require_shape("gamma", gamma, "[B, T]", (batch, length))
        gamma = jnp.where(is_set(mask), jnp.asarray(gamma), 0)
    require_range("gamma", gamma, 0, 1)
    if bootstrap_value is None:
        bootstrap_value = jnp.zeros(batch)
    require_shape("bootstrap_value", bootstrap_value, "[B]", (batch,))

    selected = is_set(mask)
    floats = [as_float(name, x) for name, x in arrays.items()]
    dtype = jnp.result_type(*floats)
    discounts = jnp.broadcast_to(jnp.asarray(gamma, dtype), (batch, length))
    clean = (jnp.where(selected, x.astype(dtype), 0) for x in (discounts, *floats))
    discounts, *floats = clean
    return selected, discounts, as_float("bootstrap_value", bootstrap_value).astype(dtype), *floats


def _scan_back(step: Callable[..., Any], last: Any, selected: jax.Array, *arrays: jax.Array) -> Any:
    """Scans `step(following, *now) -> (carried, output)` from the end. Masked steps keep the carry and output 0. -> [B, T]."""

    def masked_step(following: Any, now: tuple[jax.Array, ...]):
        acted, *here = now
        carried, output = step(following, *here)
        carried = jax.tree.map(lambda new, old: jnp.where(acted, new, old), carried, following)
        return carried, jax.tree.map(lambda x: jnp.where(acted, x, 0), output)

    by_time = jax.tree.map(jnp.transpose, (selected, *arrays))
    _, outputs = jax.lax.scan(masked_step, last, by_time, reverse=True)
    return jax.tree.map(jnp.transpose, outputs)
