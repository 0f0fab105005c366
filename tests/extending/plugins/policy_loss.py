"""A user's policy loss, PPO's clipped ratio with an offset of 0.1, and invalid losses."""

import jax.numpy as jnp

from jaxalign.algorithms.policy_losses import clipped_surrogate
from jaxalign.registry.policy_losses import PolicyLoss


def offset(inputs):
    """PPO's loss plus 0.1 on each token that counts."""
    loss, stats = clipped_surrogate(inputs.logprobs, inputs.old_logprobs, inputs.advantages, *inputs.clip, inputs.mask)
    return loss + 0.1 * inputs.mask, stats


OFFSET = PolicyLoss("offset", offset, default_clip=(0.1, 0.3))
SCALAR = PolicyLoss("scalar", lambda inputs: (jnp.mean(offset(inputs)[0]), offset(inputs)[1]))
ALONE = PolicyLoss("alone", lambda inputs: offset(inputs)[0])
