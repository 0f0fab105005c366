"""The built-in advantage estimators with their records, and the call of the selected one (`config.ppo.advantages`).

There are B responses of N tokens. rloo, grpo and remax compare whole responses: each response's total reward gives one
advantage, which all of its tokens share.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxalign.algorithms import advantages, groups
from jaxalign.config import PPOConfig
from jaxalign.errors import UserError
from jaxalign.registry.advantages import ADVANTAGES, AdvantageEstimator
from jaxalign.registry.custom import require_array, run_custom, wrong_result


@dataclasses.dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of an advantage estimator.

    Attributes:
      rewards: float32 [B, N], 0 past the response: the score on the last token (or scores on each token), minus the KL penalty
        if `config.ppo.kl_in` is "reward".
      values: float32 [B, N], the critic's value before each token; zeros without a critic.
      log_ratios: float32 [B, N], the policy's log-probabilities at the start of the update minus the sampler's. Zeros unless
        the trainer's log-probabilities were computed (`needs_trainer_logprobs`).
      mask: bool [B, N], True at tokens that count.
      kept: bool [B], True for responses that count.
      baseline: float32 [B], the greedy response's reward for the same prompt (`needs_greedy`), else None.
      section: all of `config.ppo`.
    """

    rewards: Any
    values: Any
    log_ratios: Any
    mask: Any
    kept: Any
    baseline: Any
    section: PPOConfig

    @property
    def total(self) -> jax.Array:
        """float32 [B]: the sum of each response's rewards."""
        return jnp.sum(self.rewards, axis=1)


def estimator_of(section: PPOConfig) -> AdvantageEstimator:
    """The record that `config.ppo.advantages` selects. Raises UserError if there is none."""
    return ADVANTAGES.get(section.advantages, "config.ppo.advantages")


def estimate(inputs: AdvantageInputs) -> tuple[jax.Array, jax.Array]:
    """(advantages, returns), both float32 [B, N], from the estimator of `inputs.section`.

    Raises:
      UserError: a custom estimator raises, or returns the wrong shape or dtype.
    """
    arrays = [inputs.rewards, inputs.values, inputs.log_ratios, inputs.mask]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    chex.assert_shape(inputs.kept, inputs.mask.shape[:1])
    record = estimator_of(inputs.section)
    if inputs.section.advantages in ADVANTAGES.builtin:
        return record.load()(inputs)
    name = f"advantage estimator {record.name!r}"
    _require_declared(name, record, inputs)
    estimates = run_custom(name, record.load(), inputs, "(advantages, returns)", 2)
    for part, array in zip(("advantages", "returns"), estimates, strict=True):
        require_array(name, part, array, inputs.rewards.shape)
    advantages, returns = (jnp.where(inputs.mask, array, 0.0) for array in estimates)
    return advantages, returns


def _require_declared(name: str, record: AdvantageEstimator, inputs: AdvantageInputs) -> None:
    """Raises UserError if the result of a custom estimator depends on an input that its record does not declare, and which
    is therefore missing. Other errors are those of the call itself."""
    flags = {"values": "needs_critic", "log_ratios": "needs_trainer_logprobs", "baseline": "needs_greedy"}
    undeclared = {field: flag for field, flag in flags.items() if not getattr(record, flag)}
    # A float32 [B] in place of the missing baseline, so that the function can be traced.
    arrays = {field: inputs.total if field == "baseline" else getattr(inputs, field) for field in undeclared}
    try:
        traced = jax.make_jaxpr(lambda given: record.load()(dataclasses.replace(inputs, **given)))(arrays).jaxpr
    except Exception:  # Custom code may raise anything; the call reports it.
        return
    live = set(map(id, traced.outvars))
    for equation in reversed(traced.eqns):
        if not live.isdisjoint(map(id, equation.outvars)):
            live.update(map(id, equation.invars))
    for field, variable in zip(sorted(arrays), traced.invars, strict=True):  # Sorted, as the leaves of a dictionary are.
        if id(variable) in live:
            raise UserError(f"{name} reads inputs.{field}, but its record does not declare {undeclared[field]}=True; add it")


def check_estimates(section: PPOConfig, rewards, values, advantages, returns) -> None:
    """Raises UserError if a custom estimator returned NaN or infinity for finite rewards and values.

    Built-in estimators are not checked: the update skips non-finite gradients, and the check `finite_gradients` reports them.
    """
    if section.advantages in ADVANTAGES.builtin or not bool(jnp.all(jnp.isfinite(rewards)) & jnp.all(jnp.isfinite(values))):
        return
    for part, array in {"advantages": advantages, "returns": returns}.items():
        if not bool(jnp.all(jnp.isfinite(array))):
            raise wrong_result(f"advantage estimator {estimator_of(section).name!r}",
                               f"{part} with non-finite entries although all inputs are finite", "finite numbers only")


@ADVANTAGES.declare("gae", needs_critic=True, values_suffice=True, reads=("gamma", "lam"))
def gae(inputs: AdvantageInputs):
    """Generalised advantage estimation; returns are the lambda-returns."""
    section = inputs.section
    return advantages.gae(inputs.rewards, inputs.values, inputs.mask, section.gamma, section.lam)


@ADVANTAGES.declare("reinforce", needs_critic=True, values_suffice=True, reads=("gamma",))
def reinforce(inputs: AdvantageInputs):
    """Discounted returns minus the critic's value."""
    return advantages.reinforce_baseline(inputs.rewards, inputs.values, inputs.mask, inputs.section.gamma)


@ADVANTAGES.declare("vtrace", needs_critic=True, needs_trainer_logprobs=True, reads=("gamma", "lam"))
def vtrace(inputs: AdvantageInputs):
    """V-trace, with importance weights of the trainer's over the sampler's probabilities."""
    section = inputs.section
    result = advantages.vtrace(inputs.rewards, inputs.values, inputs.log_ratios, inputs.mask, section.gamma, section.lam)
    return result.advantages, result.targets


@ADVANTAGES.declare("rloo", needs_groups=True)
def rloo(inputs: AdvantageInputs):
    """The response's reward minus the mean reward of the others in its group."""
    return _of_rows(inputs, groups.rloo(inputs.total, inputs.section.group_size, inputs.kept))


@ADVANTAGES.declare("grpo", needs_groups=True, reads=("group_scale",))
def grpo(inputs: AdvantageInputs):
    """The reward minus its group's mean, over the group's standard deviation unless `config.ppo.group_scale` is "none"."""
    section = inputs.section
    return _of_rows(inputs, groups.grpo(inputs.total, section.group_size, section.group_scale, inputs.kept))


@ADVANTAGES.declare("reinforce_pp", reads=("gamma",))
def reinforce_pp(inputs: AdvantageInputs):
    """REINFORCE++, with the group's mean reward subtracted if `config.ppo.group_size` is above 1."""
    section = inputs.section
    size = section.group_size if section.group_size > 1 else None
    whitened = advantages.reinforce_plus_plus(inputs.rewards, inputs.mask, section.gamma, size)
    return whitened, jnp.zeros_like(inputs.rewards)


@ADVANTAGES.declare("remax", needs_greedy=True)
def remax(inputs: AdvantageInputs):
    """The response's reward minus the greedy response's."""
    return _of_rows(inputs, groups.remax(inputs.total, inputs.baseline, inputs.kept))


def _of_rows(inputs: AdvantageInputs, rows):
    """Spreads one advantage per response [B] over its tokens. Returns are zeros, since there is no critic."""
    return groups.broadcast_to_tokens(rows, inputs.mask), jnp.zeros_like(inputs.rewards)
