"""The doctor's self-test runs PPO and its step-0 checks, and `--gpu` runs tests and benchmarks and writes one file."""

from __future__ import annotations

import json

import pytest

from jaxalign.config import Mesh
from jaxalign.diagnosis import gpu, selftest
from jaxalign.errors import UserError
from jaxalign.rl.checks import check_of


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


@pytest.mark.process
def test_tests_and_benchmarks_are_written_to_one_file(tmp_path, monkeypatch):
    """On the CPU, with one file of tests, a benchmark at its smallest size, and one that fails."""
    monkeypatch.setattr(gpu, "_self_test", lambda content, environment: iter(()))  # It is tested above.
    small = ("advantages_scan.py", "--batch", "2", "--new", "4", "--json")
    found = list(gpu.measure(tmp_path / "results.json", "cpu", ["tests/test_json_text.py"],
                             {"scan": small, "broken": ("advantages_scan.py", "--zzz")}))
    assert [(finding.topic, finding.status) for finding in found] == [
        ("tests", "ok"), ("benchmark scan", "ok"), ("benchmark broken", "problem"), ("results", "ok")]
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["device"] == "cpu" and content["tests"]["counts"]["passed"] > 0 and content["tests"]["failed"] == []
    assert content["benchmarks"]["scan"]["benchmark"] == "advantages_scan" and content["benchmarks"]["broken"]["code"] == 2


@pytest.mark.process
def test_without_a_gpu_one_sentence_says_so(tmp_path):
    with pytest.raises(UserError, match="--gpu needs a GPU, and JAX .* finds no device of the platform nonesuch"):
        list(gpu.measure(tmp_path / "results.json", "nonesuch"))
    assert not (tmp_path / "results.json").exists()


def test_every_part_exists():
    assert all((gpu.ROOT / "benchmarks" / words[0]).is_file() for words in gpu.BENCHMARKS.values())
    assert all((gpu.ROOT / folder).is_dir() for folder in gpu.TESTS)
