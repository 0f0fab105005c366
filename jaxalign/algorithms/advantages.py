"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import as_float, require_range, require_same_shape, require_shape


def gae(
    rewards: Any, values: Any, mask: Any, gamma: Any = 1.0, lam: Any = 0.95, bootstrap_value: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Advantages and lambda-returns in one backward scan.

        delta_t = r_t + gamma_t V_{t+1} - V_t,    A_t = delta_t + gamma_t lam A_{t+1},    R_t = A_t + V_t

    Masked steps (padding, or tokens inside a response which the policy did not write) are as if they were cut out: the
    step before takes the value and the advantage of the next step that counts, is discounted once, and nothing that
    stands at a masked place is read.

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
    require_same_shape(rewards=rewards, values=values, mask=mask)
    require_shape("rewards", rewards, "[B, T]", (None, None))
    batch, length = jnp.shape(rewards)
    if jnp.ndim(gamma):
        require_shape("gamma", gamma, "[B, T]", (batch, length))
    require_shape("lam", lam, "scalar", ())
    require_range("gamma", gamma, 0, 1)
    require_range("lam", lam, 0, 1)
    if bootstrap_value is None:
        bootstrap_value = jnp.zeros(batch)
    require_shape("bootstrap_value", bootstrap_value, "[B]", (batch,))

    rewards, values = as_float("rewards", rewards), as_float("values", values)
    dtype = jnp.promote_types(rewards.dtype, values.dtype)
    discounts = jnp.broadcast_to(jnp.asarray(gamma, dtype), (batch, length))
    lam = jnp.asarray(lam, dtype)
    selected = jnp.asarray(mask) != 0

    def step(following: tuple[jax.Array, jax.Array], now: tuple[jax.Array, ...]):
        next_value, next_advantage = following
        reward, value, discount, acted = now
        advantage = reward + discount * next_value - value + discount * lam * next_advantage
        carried = jnp.where(acted, value, next_value), jnp.where(acted, advantage, next_advantage)
        return carried, jnp.where(acted, advantage, 0)

    last = jnp.asarray(bootstrap_value, dtype), jnp.zeros(batch, dtype)
    by_time = jax.tree.map(jnp.transpose, (rewards.astype(dtype), values.astype(dtype), discounts, selected))
    _, advantages = jax.lax.scan(step, last, by_time, reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(selected, advantages + values, 0)
