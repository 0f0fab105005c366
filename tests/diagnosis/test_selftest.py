"""The doctor's self-test runs PPO and its step-0 checks."""

from __future__ import annotations

import pytest

from jaxalign.config import Mesh
from jaxalign.diagnosis import selftest
from jaxalign.rl.checks import check_of


@pytest.mark.slow
def test_the_self_test_runs_the_five_checks_of_step_zero():
    found = list(selftest.findings_of("one device", selftest.run_ppo(Mesh())))
    assert [finding.status for finding in found] == ["ok"] * 6
    assert [finding.text.split(" ")[0] for finding in found[1:]] == ["ratio", "reference", "sampler", "micro-batches", "finite"]


def test_a_failed_check_and_a_loss_that_is_not_finite_are_problems():
    failed = check_of("ratio", 0.5, 1e-3, "old log-probs are not the policy's")
    found = list(selftest.findings_of("one device", selftest.SelfTest((failed,), (1.0, float("nan"), 1.0), 2.0, 0.1)))
    assert [finding.status for finding in found] == ["problem", "problem"]
    assert "a loss is not finite" in found[0].text and "ratio 0.5 (tolerance 0.001): old log-probs" in found[1].text


def test_the_rate_of_products_is_that_of_a_computer():
    assert 1e8 < selftest.product_rate("float32", runs=1) < 1e15
