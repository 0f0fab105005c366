"""What the report states on changes since RL or DPO began."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign.tracking.report.changes import kl_reference, policy_stages
from jaxalign.tracking.workdir import read_run

from .pages import render_page
from .synthetic import make_run, write_json


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def test_the_change_of_each_rate_has_its_interval_its_answers_and_its_verdict(run):
    """24 of 200 (8.20% to 17.23%) before and 9 of 200 (2.39% to 8.33%) after, by hand: -7.5 - hypot(4.5 - 2.39, 17.23 - 12),
    -7.5 + hypot(8.33 - 4.5, 12 - 8.2)."""
    page = render_page(run)[1]
    assert ("Since RL began, from the model after supervised CAI to the model after RL: the rate “Harmful help” fell from "
            "12.0% to 4.5% (by -7.5 points; 95% interval -13.1 to -2.1; 200 answers each), which is more than noise and better;"
            ) in page.text("lead")
    assert "the differences in “Helpful” and “Evasive” are within noise." in page.text("lead")
    changes = page.text("changes")
    assert ("Harmful help 12.0% (24/200) 8.2% to 17.2% 4.5% (9/200) 2.4% to 8.3% -7.5 points (-13.1 to -2.1) "
            "more than noise, better") in changes
    assert ("The judge preferred the model after RL over the model after supervised CAI in 63.1% of 160 comparisons (95% "
            "interval 55.4% to 70.2%); the distance from 50% is more than noise.") in changes
    assert "Between the first and the last 10 of 60 steps of ppo, the mean score rose from" in changes
    assert "the KL to sft rose from 0.22 to 2.62 (by 2.40;" in changes  # Means of 0.048 * step over 0..9 and over 50..59.


def test_a_difference_without_an_interval_gets_no_verdict(run):
    edit(run / "summary.json", lambda summary: summary.update(rates={}, win_rates=[], kl={}, length={}))
    page = render_page(run)[1]  # The rows have no scores of single answers.
    assert "Preference score before normalisation 0.01 1.31 +1.30, interval unknown: too few answers" in page.text("changes")
    assert "Since RL began" not in page.text("lead")


def test_the_running_stage_is_described_once(run):
    edit(run / "ppo" / "manifest.json", lambda manifest: manifest.update(status="running"))
    for stage in ("evaluate", "report"):
        shutil.rmtree(run / stage, ignore_errors=True)
    (run / "summary.json").unlink()
    live, final = render_page(run, refresh=60)[1], render_page(run)[1]
    sentence = final.text("changes")[final.text("changes").index("Between the first") :].partition(" “More than")[0]
    assert sentence in live.text("lead") and "changes" not in live.sections


def test_the_second_round_of_rl_is_compared_with_the_first(run):
    edit(run / "config.json", lambda config: config.update(rounds=2))
    shutil.copytree(run / "ppo", run / "round-2" / "ppo")
    files = read_run(run)
    assert [(stage.label, stage.before, stage.after) for stage in policy_stages(files)] == [
        ("ppo", "sft", "ppo"), ("ppo, round 2", "ppo", "round-2/ppo")]
    assert (kl_reference(files, "ppo"), kl_reference(files, "ppo, round 2")) == ("sft", "ppo")
    assert "RL in round 2 (stage ppo, round 2)" in render_page(run)[1].text("changes")


def test_how_to_record_answers_during_rl_is_stated_where_it_is_possible(run):
    hint = "Answers during RL were not recorded; config.ppo.alarms.every=10 records those to held-out helpful prompts"
    assert hint in render_page(run)[1].text("rl")
    edit(run / "config.json", lambda config: config.update(data={"source": "preferences_jsonl"}))
    assert hint not in render_page(run)[1].text("rl")  # There are no helpful prompts.
