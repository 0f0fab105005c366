"""`benchmarks/gpu.py` on a CPU: its parts are processes with limits, and their findings and output are in one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxalign import doctor

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(FOLDER))
import gpu  # noqa: E402

SCAN = gpu.benchmark("advantages_scan", "--batch", "2", "--new", "4", "--json")
TESTS = ("-m", "pytest", "tests/test_json_text.py", "-vv", "-n", "1", "-p", "no:cacheprovider")


def parts(**found) -> dict[str, gpu.Part]:
    return {name: gpu.Part(*part) for name, part in found.items()}


@pytest.mark.slow
@pytest.mark.process
def test_parts_are_written_to_one_file_with_their_output(tmp_path):
    """A file of tests and a benchmark run at the same time; a third part fails, and a fourth is ended at its limit."""
    chosen = parts(
        tests=(TESTS, 120, False, True), scan=(SCAN, 120, True, True), broken=(gpu.benchmark("advantages_scan", "--zzz"), 120),
        slow=(("-c", "import time; print('begun', flush=True); time.sleep(60)"), 1.0, False),
    )
    assert gpu._groups(chosen) == [["tests", "scan"], ["broken"], ["slow"]]
    found = {finding.topic: finding for finding in gpu.measure(tmp_path / "results.json", chosen, platform="cpu")}
    assert {topic: finding.status for topic, finding in found.items()} == {
        "device": "ok", "tests": "ok", "scan": "ok", "broken": "problem", "slow": "problem", "results": "ok"}
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["device"] == "cpu" and content["versions"]["jax"]
    counts = content["parts"]["tests"]["counts"]
    assert counts["passed"] > 5 and counts["failed"] == 0 and content["parts"]["tests"]["failed"] == []
    assert content["parts"]["scan"]["result"]["benchmark"] == "advantages_scan"
    assert content["parts"]["broken"]["code"] == 2 and "--zzz" in content["parts"]["broken"]["output"]
    assert content["parts"]["slow"]["code"] is None and content["parts"]["slow"]["output"] == "begun\n"
    assert "ended at its limit, after 1 s: begun" in found["slow"].text


@pytest.mark.process
def test_a_part_without_time_left_is_reported_as_not_run(tmp_path):
    (_, late, _) = gpu.measure(tmp_path / "results.json", parts(scan=(SCAN, 120)), seconds=1, platform="cpu")
    assert late == ("scan", "problem", "not run: the 1 s of --seconds are over; raise it, or use --only")


@pytest.mark.process
def test_the_doctor_reports_a_script_that_ends_without_results(tmp_path, monkeypatch):
    script = tmp_path / "gpu.py"
    script.write_text('import json; print(json.dumps({"topic": "device", "status": "ok", "text": "x"})); raise SystemExit(1)')
    monkeypatch.setattr(doctor, "SCRIPT", script)
    *_, last = doctor.measure(tmp_path / "results.json")
    assert last == ("gpu", "problem", "benchmarks/gpu.py ended with code 1 before its results")


@pytest.mark.process
def test_without_a_gpu_the_doctor_says_so(tmp_path):
    (found,) = doctor.measure(tmp_path / "results.json", "--platform", "nonesuch")
    assert found.status == "problem" and "finds no device of the platform nonesuch" in found.text
    assert not (tmp_path / "results.json").exists()


def test_every_part_exists():
    scripts = [part.words[0] for part in (gpu.PARTS | gpu.LONGER).values() if part.words[0] != "-m"]
    assert all((FOLDER.parent / script).is_file() for script in scripts) and scripts
    assert all((FOLDER.parent / path).exists() for path in gpu.TESTS)
