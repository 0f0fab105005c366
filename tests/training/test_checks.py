"""The four numbers of step 0: right on a fresh state, wrong when something is."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.training.checks import Check, act_on, sampler_gap, step_zero_checks
from tests import tiny

NAMES = ["ratio", "reference KL", "sampler gap", "micro-batches"]


def checked(setup, reference_seed=0, temperature=None, spoil=None):
    """The checks of a fresh state; its rollout may be sampled at another temperature or spoiled."""
    state, frozen = tiny.state(setup), tiny.roles(setup, reference_seed)
    changes = {} if temperature is None else {"temperature": temperature}
    sampled = tiny.rollout(setup, state.policy.params, **changes)
    sampled = sampled if spoil is None else spoil(sampled)
    experience, _ = tiny.experience(setup, state, frozen, sampled)
    found = step_zero_checks(setup, frozen.reference, state.policy.params, sampled, experience, state.kl_coef)
    assert [check.name for check in found] == NAMES
    assert all(check.passed == (check.value <= check.tolerance) and np.isfinite(check.value) for check in found)
    return found


def test_an_odd_number_of_rows_is_split_too():
    """The check cuts the batch into micro-batches of its own."""
    setup = tiny.setup()
    state, frozen = tiny.state(setup), tiny.roles(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    experience, _ = tiny.experience(setup, state, frozen, sampled)
    three = jax.tree.map(lambda x: x[:3], (sampled, experience))
    found = step_zero_checks(setup, frozen.reference, state.policy.params, *three, state.kl_coef)
    assert all(check.passed for check in found)


def failed(checks):
    return [check.name for check in checks if not check.passed]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8}])
def test_a_fresh_state_passes(settings):
    """Also with filters: they change what is sampled, not what its log-probability is."""
    checks = checked(tiny.setup(**settings))
    assert failed(checks) == []
    assert checks[1].value == 0  # equal weights and one function: not a rounding apart


def test_bfloat16_passes_where_its_rounding_is_allowed_for():
    """Weights stay float32. Sampler and trainer may round differently, by some 2^-8 of a logit."""
    assert failed(checked(tiny.setup(compute_dtype="bfloat16", sampler_tolerance=0.05))) == []
    assert {leaf.dtype for leaf in jax.tree.leaves(tiny.state(tiny.setup(compute_dtype="bfloat16")).policy.params)} == {
        np.dtype("float32")
    }


def test_another_temperature_in_the_sampler_is_found():
    assert failed(checked(tiny.setup(), temperature=0.7)) == ["ratio", "sampler gap"]


def test_another_reference_is_found():
    assert failed(checked(tiny.setup(), reference_seed=1)) == ["reference KL"]


def test_one_wrong_log_probability_is_found():
    def spoil(sampled):
        return dataclasses.replace(sampled, logprobs=sampled.logprobs.at[3, 0].add(0.01))

    checks = checked(tiny.setup(), spoil=spoil)
    assert failed(checks) == ["ratio", "sampler gap"]
    assert checks[2].value == pytest.approx(0.01, rel=1e-2)
    assert checks[0].value == pytest.approx(1 - np.exp(-0.01), rel=1e-2)


def test_garbage_behind_a_response_is_not_a_gap():
    setup = tiny.setup()
    state = tiny.state(setup)
    sampled = tiny.rollout(setup, state.policy.params)
    behind = np.arange(8)[None] >= np.asarray(sampled.response_length)[:, None]
    assert behind.any()
    garbage = dataclasses.replace(sampled, logprobs=np.where(behind, -50.0, sampled.logprobs).astype(np.float32))
    assert float(sampler_gap(setup, state.policy.params, garbage)) < 1e-4


BAD = Check("ratio", 0.5, 1e-3, False, "why it matters")
GOOD = Check("reference KL", 0.0, 1e-5, True, "why it matters")


def test_a_failed_check_warns_or_stops_as_configured(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        act_on((GOOD, BAD), "warn", "ppo")
    assert [record.getMessage() for record in caplog.records] == [
        "ppo: check 'ratio' is 0.5, above its tolerance 0.001 (why it matters)"
    ]
    with pytest.raises(UserError, match="check 'ratio' is 0.5.*config.ppo.on_sampler_gap is 'stop'"):
        act_on((GOOD, BAD), "stop", "ppo")
    act_on((GOOD,), "stop", "ppo")
