"""The built-in policy losses with their records, and the call of the selected loss (`config.ppo.policy_loss`)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxalign.algorithms import policy_losses as losses
from jaxalign.algorithms.policy_losses import SurrogateStats
from jaxalign.config import PPOConfig
from jaxalign.registry.custom import require_array, run_custom
from jaxalign.registry.policy_losses import POLICY_LOSSES


@dataclasses.dataclass(frozen=True)
class PolicyLossInputs:
    """The inputs of a policy loss: float32 [B, N] arrays over response tokens unless noted otherwise.

    Attributes:
      logprobs: log-probabilities under the policy being trained; the only array through which gradients flow.
      old_logprobs: log-probabilities under the policy before the update.
      advantages: the advantages, already whitened if `config.ppo.whiten_advantages` is set.
      mask: 1 at tokens that count, else 0. Where it is 0, the loss and its gradient must be 0.
      clip: (low, high) from `config.ppo.clip` and `clip_high`, or the record's default.
      section: all of `config.ppo`.
    """

    logprobs: Any
    old_logprobs: Any
    advantages: Any
    mask: Any
    clip: tuple[float, float]
    section: PPOConfig


def surrogate(section: PPOConfig, logprobs, old_logprobs, advantages, mask) -> tuple[jax.Array, SurrogateStats]:
    """(loss float32 [B, N], `SurrogateStats`) from `config.ppo.policy_loss`.

    Raises:
      UserError: a custom policy loss raises, or returns the wrong shape or dtype.
    """
    record = POLICY_LOSSES.get(section.policy_loss, "config.ppo.policy_loss")
    bounds = record.clip_range(section.clip, section.clip_high)
    inputs = PolicyLossInputs(logprobs, old_logprobs, advantages, mask, bounds, section)
    if section.policy_loss in POLICY_LOSSES.builtin:
        return record.load()(inputs)
    name = f"policy loss {record.name!r}"
    loss, stats = run_custom(name, record.load(), inputs, "(loss, SurrogateStats)", 2)
    require_array(name, "a loss", loss, logprobs.shape)
    if not isinstance(stats, SurrogateStats):
        stats = run_custom(name, SurrogateStats._make, stats, "(loss, SurrogateStats)", 3)
    return loss, stats


@POLICY_LOSSES.declare("clip", reads=("clip", "clip_high", "dual_clip"))
def clip(inputs: PolicyLossInputs):
    """PPO's clipped ratio, with `config.ppo.dual_clip`."""
    return losses.clipped_surrogate(
        inputs.logprobs, inputs.old_logprobs, inputs.advantages, *inputs.clip, inputs.mask, inputs.section.dual_clip
    )


# The ratio is a geometric mean over the response, so the paper's range (arXiv 2507.18071) is far narrower than PPO's.
@POLICY_LOSSES.declare("gspo", default_clip=(3e-4, 4e-4))
def gspo(inputs: PolicyLossInputs):
    """GSPO: one clipped ratio for the whole response."""
    return losses.gspo(inputs.logprobs, inputs.old_logprobs, inputs.advantages, *inputs.clip, inputs.mask)


@POLICY_LOSSES.declare("cispo")
def cispo(inputs: PolicyLossInputs):
    """CISPO: the clipped ratio as a constant weight of the policy gradient."""
    return losses.cispo(inputs.logprobs, inputs.old_logprobs, inputs.advantages, *inputs.clip, inputs.mask)


# The clip affects only the metric clip_fraction.
@POLICY_LOSSES.declare("plain")
def plain(inputs: PolicyLossInputs):
    """REINFORCE, without a ratio; the statistics are those of PPO."""
    _, stats = losses.clipped_surrogate(inputs.logprobs, inputs.old_logprobs, inputs.advantages, *inputs.clip, inputs.mask)
    return losses.policy_gradient(inputs.logprobs, inputs.advantages, inputs.mask), stats
