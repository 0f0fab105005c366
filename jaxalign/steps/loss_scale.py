"""Dynamic loss scaling for float16.

In float16 the gradients of activations underflow to 0 below 6e-8 (6e-5 where subnormal numbers are flushed) and overflow above
65,504. The loss is therefore multiplied by a power of two, the scale, before the backward pass. The gradients are divided by
it afterwards in float32, which is exact. A step with non-finite gradients changes no parameter and halves the scale;
`GROWS_AFTER` finite steps in a row double it (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

The parameters are constants instead of options, since the scale converges from any start: a start that is too high costs one
skipped step per halving, at most 15, and a start that is too low is doubled. PyTorch, Apex and jmp have the same defaults,
except that the first two start at 2^16.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxalign.models.model import Model

START = 2.0**15
GROWS_AFTER = 2000
FLOOR = 1.0
CEILING = 2.0**24  # Bounds the doubling if all gradients are 0.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The current scale.

    Attributes:
      scale: float32 [], the factor of the loss, a power of two.
      finite_steps: int32 [], the number of finite steps since the scale last changed.
    """

    scale: jax.Array
    finite_steps: jax.Array

    def after(self, finite: jax.Array) -> LossScale:
        """The scale after a step. finite: bool [], whether all gradients of the step were finite."""
        steps = jnp.where(finite, self.finite_steps + 1, 0)
        grows = steps >= GROWS_AFTER
        scale = jnp.where(grows, jnp.minimum(2 * self.scale, CEILING), self.scale)
        scale = jnp.where(finite, scale, jnp.maximum(self.scale / 2, FLOOR))
        return LossScale(scale, jnp.where(grows, 0, steps))

    def explains(self, loss: jax.Array) -> jax.Array:
        """bool []: whether the scale may have caused non-finite gradients, because the loss is finite and the scale is above
        its minimum."""
        return jnp.isfinite(loss) & (self.scale > FLOOR)


def first_scale(model: Model) -> LossScale | None:
    """The scale before the first step; None for a model whose gradients need no loss scale."""
    if model.config.compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(START), jnp.int32(0))
