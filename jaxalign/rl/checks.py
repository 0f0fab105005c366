"""The run-time checks of RL: their measurements, their tolerances, and the action on a failure."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxalign.config import Checks, OnlineChecks
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.precision import FLOAT32_BITS, product_bits
from jaxalign.rl.arguments import RoleArguments
from jaxalign.rl.responses import logprobs_by_parts, response_mask
from jaxalign.steps.metrics import GradientMetrics

EXACT = 1e-3
"""The tolerance of float32 products without rounding, for log-probabilities in nats and for relative differences."""
_ROUNDINGS = 64
"""The allowed difference of two log-probabilities of a token, in roundings of an input of a product. Over 6,400 tokens of a
trained model of 260,000 parameters the largest difference was 32 roundings in float16 and 33 in bfloat16; on an NVIDIA H200 it
was 20 in bfloat16 for random weights of Llama-3.2-1B, and 6 in TensorFloat-32 for a tiny model."""
_GRADIENT_ROUNDINGS = 16
"""The allowed relative difference of gradients, in roundings of an input of a product. On an NVIDIA H200 it was 1.2 roundings
in TensorFloat-32 for a tiny model and 6 in bfloat16 for one of 1.2 billion parameters."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One run-time check: its measured value, the largest value that passes, and the meaning and likely cause of a failure."""

    name: str
    value: float
    tolerance: float
    passed: bool
    meaning: str

    @property
    def field(self) -> str:
        """The field of the stage's section `checks` that selects the action on a failure."""
        return self.name.lower().replace(" ", "_").replace("-", "_")


def check_of(name: str, value: float, tolerance: float, meaning: str) -> Check:
    """A check that passes if `value` is at most `tolerance`; NaN fails."""
    return Check(name, value, tolerance, bool(value <= tolerance), meaning)


def sampler_tolerance(setting: float, model: Model) -> float:
    """The largest allowed difference between the sampler's and the trainer's log-prob of a token, in nats.

    Args:
      setting: `sampler_tolerance` of the stage's config; 0 stands for 1e-3 where products keep float32, and elsewhere for 64
        roundings of a product's input: 0.0625 in TensorFloat-32 and float16, 0.5 in bfloat16.
      model: the policy, on its mesh.
    """
    return setting or _tolerance(model, _ROUNDINGS)


def ratio_tolerance(setting: float, model: Model) -> float:
    """The largest allowed |ratio - 1|; `setting` is as in `sampler_tolerance`, whose default it follows."""
    return setting or math.expm1(_tolerance(model, _ROUNDINGS))


def gradient_tolerance(model: Model) -> float:
    """The largest allowed relative difference between gradients that are summed in another order."""
    return _tolerance(model, _GRADIENT_ROUNDINGS)


def _tolerance(model: Model, roundings: int) -> float:
    bits = product_bits(model.config.compute_dtype, model.sharding)
    return EXACT if bits == FLOAT32_BITS else roundings * 2.0**-bits


class SamplerDifference(NamedTuple):
    """The largest values over all response tokens, float32 []: |trainer's - sampler's log-prob| in nats, and |ratio - 1|."""

    gap: jax.Array
    ratio: jax.Array


@MeshProgram
def sampler_difference(given: RoleArguments) -> SamplerDifference:
    """The largest differences between the sampler's and the trainer's log-probabilities."""
    rollout = given.rollout
    mine = logprobs_by_parts(given.model, given.params, rollout, given.temperature or 1.0, given.parts)
    real = (response_mask(rollout) > 0) & (rollout.prompt_length > 0)[:, None]
    difference = jnp.where(real, mine - rollout.logprobs, 0)
    return SamplerDifference(jnp.max(jnp.abs(difference)), jnp.max(jnp.abs(jnp.expm1(difference))))


def ratio_check(value: float, tolerance: float, when: str = "") -> Check:
    """value: the largest |ratio - 1| before any update. when: a suffix for the message, such as " at iteration 3"."""
    meaning = (f"largest |ratio - 1| before any update{when}: above this, old log-probs are not the policy's, as where the "
               "sampler's weights or numbers differ from the trainer's")
    return check_of("ratio", value, tolerance, meaning)


def gap_check(value: float, tolerance: float, when: str = "") -> Check:
    """value: the largest difference between the sampler's and the trainer's log-probs, in nats."""
    meaning = (f"largest difference of the sampler's and the trainer's log-probs{when}, nats a token: above this, the two "
               "round differently or do not have the same weights")
    return check_of("sampler gap", value, tolerance, meaning)


def unexplained(metrics: GradientMetrics) -> jax.Array:
    """The number of skipped updates that the loss scale does not explain.

    In float16, an occasional gradient overflow halves the loss scale, which resolves it. Updates with a non-finite loss, or
    with non-finite gradients even at a scale of 1, still count.
    """
    return metrics.skipped if metrics.overflowed is None else metrics.skipped - metrics.overflowed


def gradients_check(value: float, when: str) -> Check:
    """value: the share of updates with non-finite gradients, counted as in `unexplained`."""
    return check_of("finite gradients", value, 0.0, f"{when}: rewards or log-probs that are not finite or far too large, or a "
                    "learning rate too high before it; such updates are left out")


def act_on(checks: Sequence[Check], policies: Checks | OnlineChecks, stage: str, title: str = "") -> bool:
    """Warns about each failed check, or stops, according to `policies`.

    Args:
      stage: the name of the stage and of its config section.
      title: the name of the stage in messages, which may include the round; "": `stage`.

    Returns:
      Whether the old log-probabilities must be recomputed.

    Raises:
      UserError: a check failed whose policy is "stop".
    """
    recompute = False
    for check in checks:
        if check.passed:
            continue
        text = (
            f"{title or stage}: check '{check.name}' is {check.value:.3g}, above its tolerance {check.tolerance:.3g} "
            f"({check.meaning})"
        )
        policy = dataclasses.asdict(policies)[check.field]
        if policy == "stop":
            raise UserError(f"{text}; config.{stage}.checks.{check.field} is 'stop'")
        if policy == "recompute":
            recompute = True
            text += "; the old log-probabilities are recomputed"
        logging.getLogger("jaxalign").warning(text)
    return recompute
