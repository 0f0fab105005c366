"""`python -m jaxalign.doctor`: its lines, its exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json

import pytest

from jaxalign.diagnosis import machine
from jaxalign.diagnosis.findings import Finding
from jaxalign.doctor import main


def test_each_finding_is_a_line_and_all_well_is_zero(capsys, monkeypatch):
    findings = [Finding("disk", "ok", "9 GiB free"), Finding("pages", "note", "no")]
    monkeypatch.setattr(machine, "examine", lambda workdir: findings)
    assert main(["doctor", "--noselftest"]) == 0
    assert capsys.readouterr().out == "ok      disk: 9 GiB free\nnote    pages: no\n0 problems, 1 note\n"


def test_a_problem_is_exit_code_one_and_json_has_every_finding(capsys, monkeypatch):
    monkeypatch.setattr(machine, "examine", lambda workdir: [Finding("disk", "problem", "full")])
    assert main(["doctor", "--noselftest", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"topic": "disk", "status": "problem", "text": "full"}


def test_this_machine_is_examined(capsys, tmp_path):
    assert main(["doctor", "--noselftest", f"--workdir={tmp_path}"]) in (0, 1)
    topics = [line.split()[1].rstrip(":") for line in capsys.readouterr().out.splitlines()[:-1]]
    assert topics[:2] == ["versions", "devices"] and {"huge", "compile", "disk", "temporary"} <= set(topics)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--zzz"], "Unknown command line flag 'zzz'"),
    (["x"], "'x' is not expected on the command line"),
    (["--workdir=/nonexistent/runs"], "--workdir=/nonexistent/runs is not a folder; give an existing one"),
    (["--results=x.json"], "--results is given without --gpu"),
    (["--gpu", "--noselftest"], "--selftest is given with --gpu"),
])
def test_a_mistake_is_one_sentence_and_exit_code_two(capsys, arguments, message):
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
