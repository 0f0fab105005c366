"""Runs the run-time checks of an RL run and acts on their failures (`config.ppo.checks`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax

from jaxalign.errors import UserError
from jaxalign.reasons import MOSTLY, too_few
from jaxalign.records import Experience, Rollout
from jaxalign.rl.arguments import RoleArguments
from jaxalign.rl.checks import (
    EXACT,
    Check,
    act_on,
    gap_check,
    gradients_check,
    ratio_check,
    ratio_tolerance,
    sampler_difference,
    sampler_tolerance,
    unexplained,
)
from jaxalign.rl.metrics import ExperienceMetrics, UpdateMetrics
from jaxalign.rl.state import PPOSetup, PPOState
from jaxalign.rl.step_zero import step_zero_checks
from jaxalign.steps.packed import pack_rollout

OnChecks = Callable[[Sequence[Check]], None]
"""Receives the step-0 checks, to record them."""


class Monitor:
    """The checks of one run.

    Every method raises UserError if a check whose policy is "stop" fails.

    Args:
      setup: models, optimizers and options.
      on_checks: receives the step-0 checks before a failure stops the run; None for no record.
      title: the name of the stage in messages.
    """

    def __init__(self, setup: PPOSetup, on_checks: OnChecks | None = None, title: str = "ppo"):
        self._setup, self._on_checks, self._title = setup, on_checks, title
        self._config, self._policies = setup.config, setup.config.checks
        self._tolerance = sampler_tolerance(self._config.sampler_tolerance, setup.policy)
        self._act_on = functools.partial(act_on, policies=self._policies, stage="ppo", title=title)
        self._pending: tuple[int, jax.Array | None, jax.Array] | None = None
        self._warned = False

    def sampled(self, step: int, rollout: Rollout) -> None:
        """Warns once if most responses of an iteration have no stop token, and replaced or reduced scores therefore.

        Args:
          step: the iteration.
          rollout: the responses; numpy arrays.

        Raises:
          UserError: the share of responses with a stop token is below `config.ppo.required_share`.
        """
        config, ended = self._config, rollout.ended[rollout.prompt_length > 0]
        total, usable = len(ended), int(ended.sum())
        longer, other = "raise ppo.max_new_tokens", "start from a model that ends its answers"
        why = f"the other responses of iteration {step} have no stop token within ppo.max_new_tokens ({config.max_new_tokens})"
        few = too_few(total, usable, "ppo.required_share", config.required_share)
        if few:
            again = " and start the stage again with --overwrite" if step else ""
            raise UserError(f"{few}: {why}; {longer}, or {other}{again}; or lower ppo.required_share to go on")
        if usable < MOSTLY * total and config.missing_eos != "none" and not self._warned:
            self._warned = True
            logging.getLogger("jaxalign").warning(
                "%s: only %d of %d responses can keep their score: %s, and ppo.missing_eos is '%s'; %s, %s, or set "
                "ppo.missing_eos to none, which keeps all scores", self._title, usable, total, why, config.missing_eos, longer,
                other,
            )

    def must_recompute(self, params, step: int, rollout: Rollout) -> bool:
        """Whether the trainer must recompute a new rollout's old log-probabilities. params: the policy's, joined."""
        config, policies, when = self._config, self._policies, f" at iteration {step}"
        if policies.ratio == policies.sampler_gap == "warn":  # The first minibatch of the update measures both.
            return False
        rollout, parts = pack_rollout(rollout, config.micro_batch_tokens, self._setup.policy.sharding)
        difference = sampler_difference(RoleArguments(
            model=self._setup.policy, temperature=config.temperature, params=params, rollout=rollout, parts=parts
        ))
        # To recompute does no harm, so it follows every difference that float32 does not explain.
        exact = config.sampler_tolerance or EXACT
        gap = gap_check(float(difference.gap), exact if policies.sampler_gap == "recompute" else self._tolerance, when)
        if policies.sampler_gap != "warn" and self._act_on([gap]):
            return True
        limit = exact if policies.ratio == "recompute" else ratio_tolerance(config.sampler_tolerance, self._setup.policy)
        ratio = ratio_check(float(difference.ratio), limit, when)
        return policies.ratio != "warn" and self._act_on([ratio])

    def step_zero(self, state: PPOState, sampled: Rollout, experience: Experience, reference, frozen) -> None:
        """Runs the five checks before the first update. reference: the reference's parameters, joined with `frozen`."""
        checks = step_zero_checks(
            self._setup, reference, state.policy.params, sampled, experience, state.kl_coef, frozen
        )
        if self._on_checks is not None:
            self._on_checks(checks)
        done = self._policies.sampler_gap != "warn" and not self._setup.recomputes  # `must_recompute` has already acted on it.
        self._act_on([check for check in checks if not (done and check.field == "sampler_gap")])

    def scored(self, step: int, metrics: ExperienceMetrics) -> None:
        """Checks the sampler's gap on a scored rollout if the trainer's log-probabilities are always used."""
        if self._setup.recomputes and self._policies.sampler_gap == "stop":
            self._act_on([gap_check(float(metrics.sampler_gap), self._tolerance, f" at iteration {step}")])

    def updated(self, step: int, metrics: UpdateMetrics, stale: bool = False) -> None:
        """Stores the metrics of an update for the next `settle`, or checks them immediately if a failure must stop the run.

        stale: whether the rollout was sampled with older weights, so that the sampler's gap includes learning.
        """
        self._pending = (step, None if stale else metrics.sampler_gap, unexplained(metrics))
        if self._policies.finite_gradients == "stop":
            self.settle()

    def settle(self) -> None:
        """Checks the last stored update. This happens one iteration late, so that nothing waits for it: call it also after the
        last iteration."""
        if self._pending is None:
            return
        (step, gap, skipped), self._pending = self._pending, None
        trained = 2 if self._setup.owns_critic else 1
        when = f"share of the updates of iteration {step} whose gradient is not finite"
        checks = [gradients_check(float(skipped) / trained, when)]
        if self._policies.sampler_gap == "warn" and not self._setup.recomputes and gap is not None:
            checks.insert(0, gap_check(float(gap), self._tolerance, f" at iteration {step}"))
        self._act_on(checks)
