"""The audit of a judge, from the command to the report: judges in Python, the run's own model, another model, and a jury."""

from __future__ import annotations

import collections
import json
import math
import shutil

import numpy as np
import pytest
import safetensors.numpy

from jaxalign import judge_audit
from jaxalign.config import Config, from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.judge_audit import audit_judge, gold_pairs
from tests import small_run as small
from tests.folders import write_model
from tests.tracking.pages import render_page
from tests.tracking.synthetic import make_run

pytestmark = pytest.mark.medium

JUDGES = """
from jaxalign.config import Config
from jaxalign.stages.shared.judge_audit import gold_pairs

PAIRS, _ = gold_pairs(Config())
QUALITY = {}
for pair in PAIRS:
    QUALITY[pair.response_a], QUALITY[pair.response_b] = (1, 0) if pair.decided else (1, 1)


class First:
    def compare(self, requests, draw):
        return [0.9] * len(requests)


class Longer:
    def compare(self, requests, draw):
        return [0.9 if len(request.first) > len(request.second) else 0.1 for request in requests]


class Perfect:
    def compare(self, requests, draw):
        return [0.5 + 0.5 * (QUALITY[request.first] - QUALITY[request.second]) for request in requests]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory, few_sampling_programs):
    """A file of judges, and two random models with different weights."""
    root = tmp_path_factory.mktemp("audit")
    (root / "judges.py").write_text(JUDGES)
    write_model(root / "model", max_length=1024)
    shutil.copytree(root / "model", root / "other")
    weights = safetensors.numpy.load_file(root / "other" / "model.safetensors")
    safetensors.numpy.save_file({name: np.ascontiguousarray(2 * x) for name, x in weights.items()},
                                root / "other" / "model.safetensors")
    return root


@pytest.fixture
def run(root, tmp_path, capsys):
    """Runs the command; returns the content of the file that it writes, and its output."""

    def call(*arguments, code=0):
        found = judge_audit.main(["judge_audit", f"--workdir={tmp_path}", "--config.compile_cache=None", *arguments])
        out = capsys.readouterr()
        assert found == code, out.err
        path = tmp_path / "judge_audit.json"
        return json.loads(path.read_text()) if path.exists() else {}, out.out if code == 0 else out.err

    return call


def own(root, name):
    return f"--config.judge.compare={root / 'judges.py'}:{name}"


def model_flags(root):
    return ("--config.stages=compare,preference,report", "--config.model.source=huggingface",
            f"--config.model.path={root / 'model'}", "--config.model.max_length=1024", "--config.data.source=prompts_jsonl",
            "--config.data.rl=prompts.jsonl", "--config.feedback.max_outside_mass=1.0",
            "--config.feedback.undecided_margin=0.0", "--limit=4")


def test_the_built_in_pairs_do_not_favour_the_longer_answer():
    pairs, _ = gold_pairs(Config())
    decided = [pair for pair in pairs if pair.decided]
    assert (len(pairs), len(decided)) == (62, 50)
    doublings = [math.log2(len(pair.response_a) / len(pair.response_b)) for pair in decided]
    assert sum(x < 0 for x in doublings) == 25 and abs(np.mean(doublings)) < 0.1
    by_kind = collections.Counter((pair.prompt.columns["kind"], len(pair.response_a) < len(pair.response_b)) for pair in pairs)
    assert all(by_kind[kind, True] == by_kind[kind, False] for kind, _ in by_kind)
    assert len({pair.prompt.messages for pair in pairs}) == 62
    names = {principle.name for principle in load_constitution("default")}
    assert all(len(pair.principles) == 1 and pair.principles[0] in names for pair in decided)


def test_a_perfect_judge_passes(root, run):
    content, out = run(own(root, "Perfect"))
    audit = content["audit"]
    assert (audit["accuracy"]["count"], audit["accuracy"]["total"], audit["accuracy_all"]["rate"]) == (50, 50, 1.0)
    assert audit["kappa"] == {"value": 1.0, "low": 1.0, "high": 1.0} and audit["flips"]["rate"] == 0
    assert audit["calibration_error"] == 0 and audit["first_position"]["rate"] == 0.5
    assert audit["length_coefficient"]["low"] < 0 < audit["length_coefficient"]["high"]
    assert "Warning" not in out and "Correct, of the decided pairs 100.0% of 50 (92.9 to 100.0)" in " ".join(out.split())


def test_a_judge_that_prefers_the_first_answer_decides_nothing_and_always_flips(root, run):
    content, out = run(own(root, "First"))
    audit = content["audit"]
    assert audit["flips"]["rate"] == audit["first_position"]["rate"] == 1.0 and audit["accuracy"]["total"] == 0
    assert audit["kappa"]["value"] == 0 and audit["accuracy_all"]["count"] == 12
    assert "Warning: the judge decides none of the 50" in out and "Warning: for 100% of the gold pairs" in out


def test_a_judge_that_prefers_the_longer_answer_is_right_by_chance_and_shows_in_the_coefficient(root, run):
    content, out = run(own(root, "Longer"))
    audit = content["audit"]
    assert audit["accuracy"]["rate"] == 0.5 and abs(audit["kappa"]["value"]) < 0.1 and audit["flips"]["rate"] == 0
    assert audit["length_coefficient"]["low"] > 2
    assert "which may be chance" in out


def test_a_pair_is_asked_under_its_principle_or_under_drawn_ones(root, run, tmp_path):
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": "bad", "principle": name}
            for i, name in enumerate(("courtesy-1", "courtesy-1", "unknown"))]
    (tmp_path / "gold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content, _ = run(own(root, "Longer"), f"--config.judge.audit={tmp_path / 'gold.jsonl'}",
                     "--config.feedback.principles_per_comparison=3")
    assert content["audit"]["pairs"] == 3 and content["audit"]["requests"] == 2 * (1 + 1 + 3)
    assert content["audit"]["principles"]["courtesy-1"]["pairs"] >= 2
    assert content["files"] == [{"path": str(tmp_path / "gold.jsonl"), "rows": 3, "pairs": 3}]


@pytest.mark.slow
def test_a_jury_is_shown_beside_its_members(root, run):
    """The first member has the weights of the run's own model, and so the same audit."""
    local, out = run(*model_flags(root))
    assert local["judge"] == "local" and local["audit"]["requests"] == 8 and "members" not in local
    assert "the run's own model" in out
    folders = [str(root / name) for name in ("model", "other")]
    jury, out = run(*model_flags(root), "--config.feedback.judge=model", f"--config.judge.path={','.join(folders)}")
    assert [member["judge"] for member in jury["members"]] == folders and jury["judge"] == "jury"
    assert jury["members"][0]["audit"] == local["audit"]
    outside = [member["audit"]["outside"] for member in jury["members"]]
    assert 0 < outside[0] <= 1 and outside[0] != outside[1] and jury["audit"]["outside"] == pytest.approx(sum(outside) / 2)
    assert "a jury of 2 models" in out and f"member 2 is {folders[1]}" in out


@pytest.mark.slow
def test_a_model_that_pretrain_trained_is_audited_once_its_stage_is_done(done, tmp_path):
    """It reasons before its verdicts, as in the run."""
    shutil.copytree(done / "pretrain", tmp_path / "pretrain")

    def audit(**feedback):
        config = resolve_auto(from_config_dict(small.CONFIG | {"feedback": small.CONFIG["feedback"] | feedback}))
        return audit_judge(StageContext(config, tmp_path, tmp_path / "compare", False), limit=6)

    found = audit()["audit"]
    assert found["pairs"] == 6 and found["requests"] == 12 and set(found["problems"]) <= {"cut_off", "unreadable", "too_long"}
    with pytest.raises(UserError, match="stage sft, whose model judges, has not finished in"):
        audit(judge_stage="sft")


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "config.feedback.judge is 'local', and stage pretrain, whose model judges, has not finished in"),
    (("--stage=ppo",), "--stage is 'ppo'; it must be compare or evaluate"),
    (("--limit=x",), "--limit is 'x'; a number of pairs is expected"),
    (("--out=",), "--out has no value"),
    (("--config.judge.audit=nowhere.jsonl", "own"), "the file nowhere.jsonl does not exist"),
])
def test_mistakes_are_one_sentence(root, run, arguments, message):
    arguments = [own(root, "First") if argument == "own" else argument for argument in arguments]
    content, err = run(*arguments, code=2)
    assert message in err and err.count("\n") == 1 and not content


def test_out_names_another_file(root, run, tmp_path):
    content, _ = run(own(root, "Perfect"), f"--out={tmp_path / 'x' / 'audit.json'}", "--limit=2")
    assert not content and json.loads((tmp_path / "x" / "audit.json").read_text())["audit"]["pairs"] == 2


def test_the_report_has_a_section_and_the_warnings(root, run, tmp_path):
    make_run(tmp_path)
    _, page = render_page(tmp_path)
    assert "audit" not in page.sections
    _, out = run(own(root, "First"))
    assert f"added to {tmp_path / 'report.html'}" in out  # The report of a finished run is written again.
    _, page = render_page(tmp_path)
    section = page.text("audit")
    assert "The judge's audit" in section and "62 gold pairs (12 of them ties) from the built-in set" in section
    assert "Prefers the answer shown first 100.0% of 62 (94.2 to 100.0)" in section and "needless refusal 8" in section
    assert "Warning: the judge decides none of the 50 gold pairs" in page.text("lead")
