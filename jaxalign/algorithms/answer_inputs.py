"""Shared by the objectives on labelled answers: argument checks, masking, and the implicit rewards that they report.

"The first" response of a pair is the chosen response where the label is 1, and the rejected one where it is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.algorithms.guards import (
    as_float,
    is_set,
    require_range,
    require_same_shape,
    require_shape,
    shape_of,
)


class PreferenceStats(NamedTuple):
    """The implicit rewards of pairs, float32 [B] each and without gradient; 0 at masked rows.

    chosen_rewards: those of the first responses. rejected_rewards: those of the second. margins: the first minus the second.
    A pair's ranking agrees with its label where the margin is above 0 and the label above .5, or both are below.
    """

    chosen_rewards: jax.Array
    rejected_rewards: jax.Array
    margins: jax.Array


def pair_inputs(
    chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any, label: Any, mask: Any, of: str = ""
) -> tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]:
    """Checks and masks the inputs of pairs. -> (selected, label [B], [first, second], [their references]), 0 where masked."""
    if (ref_chosen is None) != (ref_rejected is None):
        raise ValueError("one of ref_chosen_logprobs and ref_rejected_logprobs is None; give both or neither")
    selected = jnp.ones(shape_of(f"chosen_{of}logprobs", chosen), bool) if mask is None else is_set(mask)
    arrays = {f"chosen_{of}logprobs": chosen, f"rejected_{of}logprobs": rejected}
    if ref_chosen is not None:
        arrays |= {"ref_chosen_logprobs": ref_chosen, "ref_rejected_logprobs": ref_rejected}
    require_same_shape(**arrays, mask=selected)
    require_shape(f"chosen_{of}logprobs", chosen, "[B]", (None,))
    floats = [jnp.where(selected, as_float(name, x), 0) for name, x in arrays.items()]
    dtype = jnp.result_type(*floats)
    floats = [x.astype(dtype) for x in floats]
    policy = floats[:2]
    reference = [jax.lax.stop_gradient(x) for x in floats[2:]] or [jnp.zeros_like(x) for x in policy]
    return selected, _judged("label", label, mask, policy[0]), policy, reference


def single_inputs(policy_logprobs: Any, ref_logprobs: Any, mask: Any, desirable: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks and masks the inputs of KTO's functions. -> (selected, desirable [B], log-ratios [B], 0 where masked)."""
    selected = jnp.ones(shape_of("policy_logprobs", policy_logprobs), bool) if mask is None else is_set(mask)
    ref_logprobs = jnp.zeros(shape_of("policy_logprobs", policy_logprobs)) if ref_logprobs is None else ref_logprobs
    require_same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs, mask=selected)
    require_shape("policy_logprobs", policy_logprobs, "[B]", (None,))
    reference = jax.lax.stop_gradient(as_float("ref_logprobs", ref_logprobs))
    log_ratios = jnp.where(selected, as_float("policy_logprobs", policy_logprobs) - reference, 0)
    return selected, _judged("desirable", desirable, mask, log_ratios), log_ratios


def _judged(name: str, judgement: Any, mask: Any, like: jax.Array) -> jax.Array:
    """Broadcasts a scalar or [B] in [0, 1] to [B], without gradient. Masked rows get the scalar, or 0 for an array."""
    if shape_of(name, judgement):
        require_shape(name, judgement, "[B]", like.shape)
        judgement = counted(judgement, mask)
    require_range(name, judgement, 0, 1)
    return jax.lax.stop_gradient(jnp.broadcast_to(as_float(name, judgement).astype(like.dtype), like.shape))


def token_counts(chosen_lengths: Any, rejected_lengths: Any, like: jax.Array, mask: Any, needed_by: str) -> list[jax.Array]:
    lengths = []
    for name, x in (("chosen_lengths", chosen_lengths), ("rejected_lengths", rejected_lengths)):
        if x is None:
            raise ValueError(f"{name} is None; {needed_by!r} averages over tokens and needs it")
        require_shape(name, x, "[B]", like.shape)
        x = counted(x, mask)
        require_range(name, x, 0)
        lengths.append(jnp.maximum(jnp.asarray(x, like.dtype), 1))
    return lengths


def counted(x: Any, mask: Any) -> Any:
    """`x` with 0 where masked. Without a mask it is `x` itself, since a guard cannot read a computed array under `jit`."""
    return x if mask is None else jnp.where(is_set(mask), jnp.asarray(x), 0)


def weigh(weight: jax.Array, loss: Callable[..., jax.Array], answers: Sequence[jax.Array], *settings: Any) -> jax.Array:
    """weight * loss(*answers, *settings), and 0 without a gradient where the weight is 0. All but the settings are [B]."""
    # A response that is impossible under the policy has an infinite loss in the order with weight 0, and 0 * inf is NaN. The
    # inner `where` does the same for the derivative.
    return jnp.where(weight == 0, 0, weight * loss(*(jnp.where(weight == 0, 0, x) for x in answers), *settings))


def reward_stats(first: jax.Array, second: jax.Array) -> PreferenceStats:
    return jax.lax.stop_gradient(PreferenceStats(first, second, first - second))
