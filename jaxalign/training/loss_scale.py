"""Dynamic loss scaling, for float16: gradients of activations below 6e-8 would be 0 there (6e-5 where subnormal numbers
are), and above 65,504 infinite.

The loss is multiplied by a power of two before the backward pass and the gradients are divided by it after, in float32, so that
nothing is rounded by it. The power is found by trying: a step whose gradients are not finite changes no parameter and halves
it, and so many finite ones in a row double it (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

These are constants and no settings, since the scale finds its own level from any start: too high a one costs a skipped step
for each halving, 15 at the very most, and too low a one is doubled. PyTorch, Apex and jmp have the same defaults, but for a
start of 2^16 in the first two.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxalign.models.model import Model

START = 2.0**15
GROWS_AFTER = 2000
FLOOR = 1.0
CEILING = 2.0**24  # Where all gradients are 0 nothing else would end the doubling.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """scale float32 []: what the loss is multiplied by, a power of two. finite_steps int32 []: steps since it last changed, all
    finite."""

    scale: jax.Array
    finite_steps: jax.Array

    def after(self, finite: jax.Array) -> LossScale:
        """The scale after a step. finite bool []: all its gradients were."""
        steps = jnp.where(finite, self.finite_steps + 1, 0)
        grows = steps >= GROWS_AFTER
        scale = jnp.where(grows, jnp.minimum(2 * self.scale, CEILING), self.scale)
        scale = jnp.where(finite, scale, jnp.maximum(self.scale / 2, FLOOR))
        return LossScale(scale, jnp.where(grows, 0, steps))

    def explains(self, loss: jax.Array) -> jax.Array:
        """bool []: gradients that are not finite may be the scale's doing, and be mended by halving it: the loss itself is
        finite, and the scale is not down to 1."""
        return jnp.isfinite(loss) & (self.scale > FLOOR)


def scales_loss(model: Model) -> bool:
    """Whether this model's gradients need a loss scale."""
    return model.config.compute_dtype == "float16"


def first_scale() -> LossScale:
    return LossScale(jnp.float32(START), jnp.int32(0))
