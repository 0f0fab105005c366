"""The checks of step 0: they pass on a fresh state, fail on each fault, and act by their own policies."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
import pytest

from jaxalign.config import Checks
from jaxalign.errors import UserError
from jaxalign.records import Rollout
from jaxalign.rl.arguments import RoleArguments
from jaxalign.rl.checks import Check, act_on, gradients_check, sampler_difference
from jaxalign.rl.monitor import Monitor
from jaxalign.rl.step_zero import share_not_finite, step_zero_checks
from jaxalign.steps import loss_scale
from jaxalign.steps.packed import pack_rollout
from tests import tiny

NAMES = ["ratio", "reference KL", "sampler gap", "micro-batches", "finite gradients"]


def checked(setup, reference_seed=0, temperature=None, spoil=None, rows=8):
    """The checks of a fresh state, whose rollout can be sampled at another temperature, be corrupted, or have fewer rows."""
    state, frozen = tiny.state(setup), tiny.roles(setup, reference_seed)
    changes = {} if temperature is None else {"temperature": temperature}
    sampled = tiny.rollout(setup, state.policy.params, **changes)
    sampled = sampled if spoil is None else spoil(sampled)
    experience, _ = tiny.experience(setup, state, frozen, sampled)
    sampled, experience = jax.tree.map(lambda x: x[:rows], (sampled, experience))
    found = step_zero_checks(setup, frozen.reference, state.policy.params, sampled, experience, state.kl_coef)
    assert [check.name for check in found] == NAMES
    assert all(check.passed == (check.value <= check.tolerance) and np.isfinite(check.value) for check in found)
    return found


def test_the_share_of_non_finite_numbers():
    """One of 2 and none of 6 make one of 8."""
    found = share_not_finite({"a": np.array([1.0, np.nan], np.float32), "b": np.ones((2, 3), np.float32)})
    assert float(found) == 0.125


def test_the_share_is_correct_for_models_of_any_size():
    """8e9 numbers overflow an int32, so neither their count nor the count of non-finite ones can be one."""
    gradients = {"up": jax.ShapeDtypeStruct((2**17, 2**16), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.float32)}
    equations = jax.make_jaxpr(share_not_finite)(gradients).eqns
    assert jax.eval_shape(share_not_finite, gradients).dtype == np.float32
    assert not [x for x in equations if x.primitive.name == "reduce_sum" and x.outvars[0].aval.dtype != np.float32]


def failed(checks):
    return [check.name for check in checks if not check.passed]


@pytest.mark.medium
@pytest.mark.variants(1)
@pytest.mark.parametrize(("settings", "rows"), [({}, 8), ({"temperature": 0.7, "top_k": 5, "top_p": 0.8}, 3)])
def test_a_fresh_state_passes(settings, rows):
    """This includes filters, which change samples but not log-probabilities, and an odd number of rows, which the check splits
    into its own micro-batches."""
    checks = checked(tiny.setup(**settings), rows=rows)
    assert failed(checks) == []
    assert checks[1].value < 2e-6  # equal weights: two compilations differ by the rounding of log-probs of a few nats


@pytest.mark.slow
def test_bfloat16_passes_with_the_tolerance_for_its_rounding():
    """Weights stay float32. Sampler and trainer may round differently, by about 2^-8 of a logit."""
    checks = checked(tiny.setup(compute_dtype="bfloat16"))
    assert failed(checks) == []
    assert {check.name: check.tolerance for check in checks if check.tolerance > 1e-3} == {
        "ratio": pytest.approx(0.6487, abs=1e-4), "sampler gap": 0.5, "micro-batches": 0.125
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(tiny.state(tiny.setup(compute_dtype="bfloat16")).policy.params)} == {
        np.dtype("float32")
    }


@pytest.mark.slow
def test_float16_passes_with_a_reduced_loss_scale(monkeypatch):
    """Under the initial scale, a high one here, gradients overflow. The check lowers the scale until they do not, as training
    does."""
    monkeypatch.setattr(loss_scale, "START", 2.0**24)
    assert failed(checked(tiny.setup(compute_dtype="float16"))) == []


@pytest.mark.medium
def test_another_temperature_in_the_sampler_is_detected():
    assert failed(checked(tiny.setup(), temperature=0.7)) == ["ratio", "sampler gap"]


@pytest.mark.medium
def test_another_reference_is_detected():
    assert failed(checked(tiny.setup(), reference_seed=1)) == ["reference KL"]


@pytest.mark.medium
def test_one_wrong_log_probability_is_detected():
    def spoil(sampled):
        logprobs = sampled.logprobs.copy()
        logprobs[3, 0] += 0.01
        return dataclasses.replace(sampled, logprobs=logprobs)

    checks = checked(tiny.setup(), spoil=spoil)
    assert failed(checks) == ["ratio", "sampler gap"]
    assert checks[2].value == pytest.approx(0.01, rel=1e-2)
    assert checks[0].value == pytest.approx(1 - np.exp(-0.01), rel=1e-2)


@pytest.mark.medium
def test_garbage_after_a_response_is_not_a_gap():
    setup = tiny.setup()
    state = tiny.state(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    behind = np.arange(8)[None] >= np.asarray(sampled.response_length)[:, None]
    assert behind.any()
    garbage = dataclasses.replace(sampled, logprobs=np.where(behind, -50.0, sampled.logprobs).astype(np.float32))
    garbage, parts = pack_rollout(garbage, 0, setup.policy.sharding)
    found = sampler_difference(RoleArguments(
        model=setup.policy, temperature=setup.config.temperature, params=state.policy.params, rollout=garbage, parts=parts
    ))
    assert float(found.gap) < 1e-4 and float(found.ratio) < 1e-4


@pytest.mark.medium
def test_a_non_finite_gradient_is_detected():
    setup = tiny.setup()
    state, frozen = tiny.state(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    experience, _ = tiny.experience(setup, state, frozen, sampled)
    experience = dataclasses.replace(experience, advantages=experience.advantages.at[2, 0].set(np.inf))
    checks = step_zero_checks(setup, frozen.reference, state.policy.params, sampled, experience, state.kl_coef)
    assert "finite gradients" in failed(checks)
    assert 0 < checks[4].value <= 1


BAD = Check("ratio", 0.5, 1e-3, False, "why it matters")
GOOD = Check("reference KL", 0.0, 1e-5, True, "why it matters")


def test_a_failed_check_warns_or_stops_or_recomputes_log_probs_by_its_own_policy(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        assert not act_on((GOOD, BAD), Checks(reference_kl="stop", sampler_gap="stop"), "ppo")
        assert act_on((BAD,), Checks(ratio="recompute"), "ppo")
    message = "ppo: check 'ratio' is 0.5, above its tolerance 0.001 (why it matters)"
    assert [record.getMessage() for record in caplog.records] == [
        message, f"{message}; the old log-probabilities are recomputed"
    ]
    with pytest.raises(UserError, match="check 'ratio' is 0.5.*config.ppo.checks.ratio is 'stop'"):
        act_on((GOOD, BAD), Checks(ratio="stop"), "ppo")
    assert not act_on((GOOD,), Checks(reference_kl="stop"), "ppo")


@pytest.mark.parametrize("name", NAMES)
def test_every_check_of_step_0_has_its_own_policy(name):
    field = {"reference KL": "reference_kl", "sampler gap": "sampler_gap", "micro-batches": "micro_batches",
             "finite gradients": "finite_gradients"}.get(name, name)
    bad = Check(name, float("nan"), 1e-3, False, "why it matters")
    with pytest.raises(UserError, match=f"config.ppo.checks.{field} is 'stop'"):
        act_on((bad,), dataclasses.replace(Checks(), **{field: "stop"}), "ppo")


def test_a_skipped_update_fails_the_check_of_gradients():
    assert gradients_check(0.0, "share").passed and not gradients_check(0.25, "share").passed


def responses(ended: int) -> Rollout:
    """Eight responses, of which `ended` have a stop token, and two rows that only fill the batch."""
    row, length = np.arange(10), np.ones(10, np.int32)
    tokens, logprobs = np.ones((10, 4), np.int32), np.zeros((10, 2), np.float32)
    return Rollout(tokens, np.where(row < 8, length, 0), length, logprobs, row < ended)


def test_responses_without_a_stop_token_are_warned_about_once_and_stop_a_run_below_the_required_share(caplog):
    setup = tiny.setup()
    monitor = Monitor(setup)
    with caplog.at_level(logging.WARNING, "jaxalign"):
        monitor.sampled(0, responses(4))
        assert not caplog.records
        monitor.sampled(1, responses(3))
        monitor.sampled(2, responses(0))
        kept = dataclasses.replace(setup, config=dataclasses.replace(setup.config, missing_eos="none"))
        Monitor(kept).sampled(0, responses(0))
    [record] = caplog.records
    assert record.getMessage().startswith("ppo: only 3 of 8 responses can keep their score: the other responses of iteration 1 "
                                          "have no stop token within ppo.max_new_tokens (8), and ppo.missing_eos is 'replace'; "
                                          "raise ppo.max_new_tokens, ")
    assert record.getMessage().endswith("or set ppo.missing_eos to none, which keeps all scores")
    Monitor(setup, title="ppo, round 2").sampled(0, responses(0))
    assert caplog.records[-1].getMessage().startswith("ppo, round 2: only 0 of 8 responses")
    strict = dataclasses.replace(setup, config=dataclasses.replace(setup.config, required_share=0.5))
    Monitor(strict).sampled(0, responses(4))
    with pytest.raises(UserError, match=r"config.ppo.required_share is 0.5, but only 3 of 8 rows \(37.5%\) can be used: the "
                                        "other responses of iteration 7 have no stop token .* raise ppo.max_new_tokens"):
        Monitor(strict).sampled(7, responses(3))
