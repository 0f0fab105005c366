"""A user's rule-based judge, in `config.feedback.judge` and in Python."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import jax
import pytest

import jaxalign as ja
from jaxalign.config import from_config_dict
from tests.small_run import read, rows, run
from tests.trainers.small import language_model

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "judge.py"
RULES = ["Be brief.", "Be kind."]


def judge(name="Brevity", **fields):
    return ja.Judge(f"{PLUGIN}:{name}", RULES, **{"reasoning": False} | fields)


@pytest.mark.slow
def test_the_stage_asks_it_in_both_orders_and_averages(done, tmp_path):
    shutil.copytree(done / "pretrain", tmp_path / "pretrain")
    stages = ("pretrain", "revise", "sft", "compare")
    run(tmp_path, stages=stages, feedback={"judge": f"{PLUGIN}:Brevity", "reasoning": False})
    for row in rows(tmp_path, "compare"):
        a, b = len(row["response_a"]), len(row["response_b"])
        if row["response_a"] == row["response_b"]:
            assert row["label_ab"] is None
        elif a == b:  # It returns 0.1 in both orders, which averages to even.
            assert (row["label"], row["decided"]) == (0.5, False)
        else:
            assert row["label"] == pytest.approx(0.9 if a < b else 0.1)
    assert read(tmp_path / "compare" / "summary.json")["unparsable"] == 0
    revised = [row for row in rows(tmp_path, "revise") if row["round"]]
    assert all(row["revision"] == row["response"][: len(row["response"]) // 2] for row in revised)


def test_the_python_api_compares_rates_critiques_and_revises_with_it():
    found = judge().compare(["Hi"] * 3, ["a", "aaa", "a"], ["aaa", "a", "a"])
    assert [c.label for c in found] == pytest.approx([0.9, 0.1, 0.5])
    assert [c.decided for c in found] == [True, True, False]
    assert judge().rate(["Hi"], ["a" * 50]) == pytest.approx([5.0])
    assert judge().critique(["Hi"], ["abc"]) == ["3 characters are too many."]
    assert [r.revision for r in judge().revise(["Hi"], ["abcdefgh"], rounds=2)] == ["abcd", "ab"]


def test_revise_and_evaluate_accept_it():
    model = language_model()
    revisions = ja.revise(model, ["Name the colour red."], RULES, judge=judge(), max_new_tokens=4)
    assert len(revisions) == 1 and revisions[0].principle in ("principle-1", "principle-2")
    found = ja.evaluate({"a": model, "b": model}, ["Name the colour red."] * 2, judge=judge(), max_new_tokens=4,
                        measures={"length": lambda prompts, responses, **columns: [len(r) for r in responses]})
    assert found.win_rates == [{"model": "b", "against": "a", "wins": 0, "total": 2, "undecided": 2, "rate": 0.5,
                                "low": found.win_rates[0]["low"], "high": found.win_rates[0]["high"],
                                "outcomes": {"identical": 2}}]
    assert found.measures["length"]["a"] == len(found.answers["a"][0])


def test_a_probability_that_is_not_a_number_leaves_the_pair_undecided():
    found = judge("NotANumber").compare(["Hi"], ["a"], ["b"])
    assert (found[0].label, found[0].decided, found[0].label_ab) == (0.5, False, None)


def test_an_evaluation_warns_of_a_judge_that_contradicts_itself_or_gives_no_verdict(caplog):
    """The answers have equal lengths, for which Brevity returns 0.1 in both orders."""
    asked, first = ["Name the colour red.", "Hi"], language_model()
    models = {"a": first, "b": dataclasses.replace(first, params=first.model.init(jax.random.key(9)))}
    ja.evaluate(models, asked, judge=judge(), max_new_tokens=4)
    found = ja.evaluate(models, asked, judge=judge("NotANumber"), max_new_tokens=4)
    assert found.answers["a"] != found.answers["b"] and found.win_rates[0]["undecided"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "evaluate: the judge prefers the other answer when they are shown in the other order for 2 of 2 pairs of b and a, and "
        "each counts as a tie; choose another judge or other templates (feedback.templates)",
        "evaluate: the judge gave no verdict on 2 of 2 pairs of b and a, and each counts as a tie: 2 nan (the judge returned "
        "NaN)"]


@pytest.mark.parametrize(("name", "message"), [
    ("WrongCount", "returned 1 results from 'compare' for 4 requests"),  # Two pairs under two principles.
    ("Missing", "has no Missing"),
    ("Text", "has none of the methods|is not a judge"),
])
def test_an_invalid_judge_is_reported_in_one_sentence(name, message):
    with pytest.raises(ja.UserError, match=message):
        judge(name).compare(["Hi"] * 2, ["a", "b"], ["b", "a"])


def test_wrong_arguments_are_named():
    with pytest.raises(ja.UserError, match="config.feedback.judge is 'locall'"):
        from_config_dict({"feedback": {"judge": "locall"}})
    with pytest.raises(ja.UserError, match="has no method 'rate'"):
        judge("WrongCount").rate(["Hi"], ["a"])
    with pytest.raises(ja.UserError, match="first"):
        judge().compare(["Hi"], ["a", "b"], ["a"])
    with pytest.raises(ja.UserError, match="at least one principle"):
        ja.Constitution([])


def test_the_judge_of_a_run_needs_a_run():
    with pytest.raises(ja.UserError, match="is 'local', which needs the base model of a pipeline run; pass a language model"):
        ja.Judge("local")
