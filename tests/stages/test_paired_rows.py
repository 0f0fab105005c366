"""The rows of summary.json on the same prompts, worked out by hand."""

from __future__ import annotations

import pytest

from jaxalign.records import Comparison, Message, Prompt
from jaxalign.stages import evaluate
from jaxalign.stages.shared.breakdown import Contest
from jaxalign.stages.shared.paired import paired_differences, win_rates, word_measures


def pair(number, first, second, label, decided=True, outcome=None):
    prompt = Prompt(f"p{number}", (Message("user", "?"),), "eval")
    return Comparison(prompt, first, second, label, decided=decided, outcome=outcome)


def test_win_rates_count_equal_and_undecided_pairs_as_half():
    """6 wins, 2 losses, an undecided pair and two equal answers of 10 prompts: 7 wins. The first answer is 2 characters longer
    in 8 pairs and 3 in the undecided one: 19 / 10."""
    labelled = [*(pair(i, "long", "ab", 0.9 if i < 6 else 0.1) for i in range(8)), pair(8, "abc", "", 0.6, decided=False),
                pair(9, "same", "same", 0.9)]
    (row,) = win_rates([Contest("ppo", "base", labelled)])
    assert (row["model"], row["against"], row["wins"], row["total"], row["undecided"]) == ("ppo", "base", 6, 10, 2)
    assert row["rate"] == 0.7 and row["bootstrap_low"] < 0.7 < row["bootstrap_high"]
    assert row["length_difference"] == pytest.approx(1.9) and row["length_controlled_problem"] is None
    assert 0 < row["length_controlled_low"] < row["length_controlled"] < row["length_controlled_high"] < 1


def test_outcomes_of_undecided_pairs_are_counted_and_missing_verdicts_printed(capsys):
    """Of 8 pairs, 5 have no verdict, more than half; of the first 6, 3 are exactly half, which is no reason for a warning."""
    labelled = [pair(0, "a", "b", 0.9), pair(1, "a", "a", 0.5, False, "identical"), pair(2, "a", "b", 0.5, False, "tie"),
                *(pair(i, "a", "b", 0.5, False, "unreadable") for i in (3, 4, 5, 6)), pair(7, "a", "b", 0.5, False, "refused")]
    rows = win_rates([Contest("ppo", "sft", labelled), Contest("ppo", "base", labelled[:6])])
    assert [row["outcomes"] for row in rows] == [{"unreadable": 4, "identical": 1, "tie": 1, "refused": 1},
                                                 {"unreadable": 3, "identical": 1, "tie": 1}]
    evaluate._warn("evaluate", rows)
    assert capsys.readouterr().out == (
        "[evaluate] warning: the judge gave no verdict on 5 of 8 pairs of ppo and sft, and each counts as a tie: 4 unreadable "
        "(the answer is none of the options, or most of its probability lies outside of them), 1 refused (the judge declined "
        "to answer)\n")
    evaluate._warn("evaluate", [{"model": "ppo", "against": "sft", "total": 8}])  # Of an older work directory.
    assert not capsys.readouterr().out


def answer(model, number, text, tokens, kind="a", **gold):
    return {"model": model, "prompt_id": number, "kind": kind, "response": text, "tokens": tokens, "complete": True, "kl": 0.0,
            "score": None, "gold": gold}


def test_differences_are_paired_by_prompt_and_kind():
    rows = [*(answer("base", i, "w " * 4, 10 * i, "ab"[i % 2], good=False) for i in range(20)),
            *(answer("ppo", i, "w " * 5, 10 * i + 3, "ab"[i % 2], good=i < 6) for i in reversed(range(20)))]
    found = paired_differences(rows, ("base", "ppo"), {"good": ("a",)})
    assert set(found) == {"ppo"} and set(found["ppo"]) == {"good", "length", "complete", "kl", "repetition"}
    assert found["ppo"]["length"] == {"difference": 3.0, "low": 3.0, "high": 3.0, "cases": 20}
    assert found["ppo"]["good"]["cases"] == 10 and found["ppo"]["good"]["difference"] == pytest.approx(0.3)  # 0, 2, 4 of 10
    assert found["ppo"]["repetition"]["difference"] == pytest.approx(0.5)  # of 2 equal 4-grams, one is a repetition


def test_word_measures_are_by_model():
    rows = [answer("base", 0, "a b c d e", 5), answer("base", 1, "a a a a a a", 6), answer("ppo", 0, "", 0)]
    found = word_measures(rows, ("base", "ppo"))
    assert found["repetition"] == {"base": pytest.approx((0 + 2 / 3) / 2), "ppo": 0.0}  # 3 equal 4-grams
    # 11 words: a b c d e; ab bc cd de aa; abc bcd cde aaa
    assert found["distinct"]["base"] == pytest.approx({"1": 5 / 11, "2": 5 / 11, "3": 4 / 11})
    assert found["distinct"]["ppo"] == {"1": None, "2": None, "3": None}
