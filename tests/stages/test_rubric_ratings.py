"""Rates by rubrics: of a run with a judge of its own, with a second judge, and the counts worked out by hand."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError
from jaxalign.feedback.rubrics import Rubric
from jaxalign.stages.shared.rubrics import summarise_ratings
from tests.folders import write_model

pytestmark = pytest.mark.slow

JUDGE = '''
from jaxalign.feedback.judge import Rating

class First:
    """Rates 2 under the rubric "harmful" and 9 under the others; 5.6 for the prompts with a 5."""

    limit = None

    def rate(self, requests, draw):
        if self.limit is not None and max(draw.rows) >= self.limit:
            raise SystemExit("out of credit")
        return [Rating(5.6 if "5" in r.messages[-1].content else {"harmful": 2.0}.get(r.principle.name, 9.0)) for r in requests]

class Second(First):
    pass

class Limited(First):
    limit = 18
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("rubrics")
    write_model(root / "model")
    (root / "judge.py").write_text(JUDGE)
    (root / "rl.txt").write_text("".join(f"the cat sat {i} times, why?\n" for i in range(8)))
    (root / "eval.csv").write_text("prompt,label\n" + "".join(f'"say, {i}",{"un" * (i % 2)}safe\n' for i in range(6)))
    return root


def settings(folder, judge="", **evaluate):
    return from_config_dict({
        "stages": ("ppo", "evaluate", "report"), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "style": "chat", "rl": str(folder / "rl.txt"), "eval": str(folder / "eval.csv")},
        "feedback": {"judge": f"{folder}/judge.py:First"}, "judge": {"evaluate": judge}, "reward": {"source": "ai_feedback"},
        "ppo": {"iterations": 1, "batch": 8, "minibatches": 1, "prompts": 8, "max_new_tokens": 8,
                "checks": {"step_zero": False}},
        "evaluate": {"batch": 4, "max_new_tokens": 8, "win_rate_prompts": 0, **evaluate},
    })


def run(workdir, config):
    pipeline.run(config, workdir)
    page = (workdir / "report.html").read_text(encoding="utf-8")
    first = re.search(r'<section id="lead".*?<p[^>]*>(.*?)</p>', page, re.DOTALL)
    return json.loads((workdir / "summary.json").read_text()), page, first.group(1)


@pytest.fixture(scope="module")
def rated(folder):
    return run(folder / "rated", settings(folder, rubrics="default", rubric_column="label"))


def test_the_rates_cover_the_prompts_of_the_rubrics_kinds_without_undecided_answers(rated):
    rates = rated[0]["rubrics"]["rates"]["ppo"]
    # Prompts 1, 3 and 5 are unsafe, and the ratings of prompt 5 are undecided.
    assert [(rates[name]["count"], rates[name]["total"], rates[name]["undecided"]) for name in rates] == [
        (2, 2, 1), (3, 3, 0), (0, 5, 1)]
    unsafe = rated[0]["rubrics"]["by_kind"]["unsafe"]["ppo"]
    assert {name: (rate["count"], rate["total"]) for name, rate in unsafe.items()} == {"harmful": (2, 2), "evasive": (0, 2)}
    assert (rates["harmful"]["least"], rates["harmful"]["most"]) == (pytest.approx(2 / 3), 1.0)


def test_without_a_second_judge_the_first_paragraph_says_so(rated):
    assert rated[2].startswith("Warning: no second judge was asked.") and "which also judged in training (ppo)" in rated[2]
    assert "These rates are a judge&#39;s opinions. No rule and no person checked them." in rated[1]
    assert "4 of 24 ratings are undecided" in rated[1] and "Rates by a rubric judge" in rated[1]


def test_a_second_judge_is_named_and_the_answers_do_not_depend_on_the_ratings(folder, rated, tmp_path):
    shutil.copytree(folder / "rated" / "ppo", tmp_path / "ppo")
    _, page, first = run(tmp_path, settings(folder, f"{folder}/judge.py:Second", rubrics="default", rubric_column="label"))
    assert "no second judge" not in page and "Second rated the answers. It judged in no stage of training." in page
    off = folder / "off"
    shutil.copytree(folder / "rated" / "ppo", off / "ppo")
    summary, page, _ = run(off, settings(folder))
    assert "rubrics" not in summary and "rubric judge" not in page and not (off / "evaluate" / "ratings").exists()
    for path in sorted((off / "evaluate").glob("rows-*.jsonl")):
        assert path.read_bytes() == (folder / "rated" / "evaluate" / path.name).read_bytes()


def test_a_stage_that_stops_keeps_its_ratings(folder, rated, tmp_path):
    shutil.copytree(folder / "rated" / "ppo", tmp_path / "ppo")
    path = folder / "limited.py"
    path.write_text(JUDGE)
    config = settings(folder, f"{path}:Limited", rubrics="default", rubric_column="label")
    with pytest.raises(UserError, match="out of credit"):
        pipeline.run(config, tmp_path)
    written = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "evaluate" / "ratings").glob("rows-*.jsonl")}
    assert written
    path.write_text(JUDGE.replace("limit = 18", "limit = None"))
    summary, _, _ = run(tmp_path, config)
    assert summary["rubrics"] == rated[0]["rubrics"]
    assert all((tmp_path / "evaluate" / "ratings" / name).stat().st_mtime_ns == time for name, time in written.items())


@pytest.mark.parametrize(("evaluate", "message"), [
    ({"rubrics": "default", "rubric_margin": 5.0}, "config.evaluate.rubric_margin"),
    ({"rubric_margin": 0.5}, "config.evaluate.rubric_margin is 0.5, which has no effect when config.evaluate.rubrics is ''"),
])
def test_settings_without_effect_are_refused(folder, evaluate, message):
    with pytest.raises(UserError, match=message):
        settings(folder, **evaluate)


def test_a_judge_that_cannot_rate_is_refused_before_the_run(folder):
    (folder / "compares.py").write_text("class Judge:\n    def compare(self, requests, draw):\n        return []\n")
    with pytest.raises(UserError, match="config.judge.evaluate is .*which has no method 'rate'; stage evaluate needs it"):
        settings(folder, f"{folder}/compares.py:Judge", rubrics="default")


def test_differences_are_paired_over_the_prompts_that_both_answers_decide():
    ratings = {"base": (2, 2, 2, 9, None), "sft": (9, 2, 9, 9, 2), "ppo": (9, 9, 9, 9, 9)}
    rows = [{"model": name, "prompt_id": f"p{i}", "kind": None, "ratings": {"bad": value}, "refusal_phrase": i < 2}
            for name, values in ratings.items() for i, value in enumerate(values)]
    found = summarise_ratings(rows, (Rubric("bad", "Is it?", "low"),), list(ratings), 1.0)
    differences = {(row["model"], row["against"]): row for row in found["differences"]}
    assert list(differences) == [("sft", "base"), ("ppo", "sft"), ("ppo", "base")]
    counts = {pair: (row["pairs"], row["gained"], row["lost"]) for pair, row in differences.items()}
    assert counts == {("sft", "base"): (4, 0, 2), ("ppo", "sft"): (5, 0, 2), ("ppo", "base"): (4, 0, 3)}
    assert differences["ppo", "base"]["difference"] == -0.75 and differences["ppo", "base"]["p"] == 0.25  # 2 / 2**3
    assert found["refusal_phrases"]["sft"] == {"all": found["refusal_phrases"]["base"]["all"]}
    assert found["refusal_phrases"]["sft"]["all"]["count"] == 2
