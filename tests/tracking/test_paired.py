"""What the report says of comparisons on the same prompts: verdicts on win rates, at equal lengths, and on differences."""

from __future__ import annotations

import json

import pytest

from .pages import render_page
from .synthetic import make_run, write_json

WIN = {"model": "ppo", "against": "sft", "wins": 60, "total": 100, "undecided": 10, "rate": 0.65, "low": 0.5525, "high": 0.7364,
       "bootstrap_low": 0.56, "bootstrap_high": 0.74, "length_difference": 41.25, "length_controlled": 0.52,
       "length_controlled_low": 0.41, "length_controlled_high": 0.63, "length_controlled_problem": None}
UNKNOWN = dict.fromkeys(("length_controlled", "length_controlled_low", "length_controlled_high"))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A function from changes of the summary to the text of a section of the report."""
    path = make_run(tmp_path_factory.mktemp("paired"))
    original = json.loads((path / "summary.json").read_text())

    def text(section, **changes):
        write_json(path / "summary.json", original | changes)
        return render_page(path)[1].text(section)

    return text


def test_a_preference_that_vanishes_at_equal_lengths(shown):
    text = shown("wins", win_rates=[WIN])
    assert ("At equal lengths, the model after RL has a win rate of 52.0% (95% interval 41.0 to 63.0) against the model after "
            "supervised CAI instead of 65.0%, and the difference from a draw is within noise: the difference in length may "
            "explain the preference.") in text
    assert "10 undecided, each counted as half a win. The difference from a draw is more than noise." in text
    assert "65.0% 56.0 to 74.0 more than noise +41.2 52.0% 41.0 to 63.0 within noise" in text


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"length_controlled_low": 0.51}, None),
    ({"length_controlled": 0.4, "length_controlled_low": 0.31, "length_controlled_high": 0.48}, "the preference is reversed."),
    ({"rate": 0.5, "low": 0.4, "high": 0.6, "bootstrap_low": 0.41, "bootstrap_high": 0.59, "length_controlled_low": 0.51},
     "the judge prefers the model after RL only at equal lengths."),
    # Both bootstrap intervals exclude a draw, so the conclusions differ by the method only.
    ({"low": 0.49, "length_controlled_low": 0.51}, None)])
def test_another_conclusion_at_equal_lengths_is_stated(shown, changes, sentence):
    text = shown("wins", win_rates=[WIN | changes])
    assert ("At equal lengths" in text) == (sentence is not None) and (sentence or "") in text


@pytest.mark.parametrize(("problem", "reason"), [
    ("few", "fewer than 10 prompts"), ("constant", "all pairs have the same outcome"),
    ("equal_lengths", "all pairs have the same difference in length"),
    ("separable", "the difference in length predicts every outcome")])
def test_an_unknown_rate_at_equal_lengths_has_its_reason(shown, problem, reason):
    text = shown("wins", win_rates=[WIN | UNKNOWN | {"length_controlled_problem": problem}])
    assert f"unknown: {reason} -" in text and "At equal lengths," not in text


def test_few_wins_in_a_row_are_not_more_than_noise(shown):
    """3 of 3: the bootstrap interval has no width, and Wilson's is 43.9% to 100%."""
    row = WIN | UNKNOWN | {"wins": 3, "total": 3, "undecided": 0, "rate": 1.0, "low": 0.4385, "high": 1.0, "bootstrap_low": 1.0,
                           "bootstrap_high": 1.0, "length_controlled_problem": "few"}
    assert "The difference from a draw is within noise." in shown("wins", win_rates=[row])


def test_a_run_of_an_earlier_version_has_no_table(shown):
    assert "at equal lengths" not in shown("wins") and "on the same prompts, with" not in shown("behaviour")


def test_differences_on_the_same_prompts_state_their_verdict(shown):
    def of(difference, low, high):
        return {"difference": difference, "low": low, "high": high, "cases": 16}

    paired = {"sft": {"harmful": of(-0.5, -0.62, -0.38), "length": of(-1.8, -4.0, 0.5), "repetition": of(0.02, None, None)},
              "ppo": {"harmful": of(-0.6, -0.7, -0.5), "length": of(0.0, 0.0, 0.0)}}
    text = shown("behaviour", paired=paired, distinct={"base": {"1": 0.25, "2": 0.5}, "ppo": {"1": 0.125, "2": None}})
    assert "Difference from the helpful-only model on the same prompts" in text
    assert ("Harmful help -50.0 points (-62.0 to -38.0), more than noise, better -60.0 points (-70.0 to -50.0), "
            "more than noise, better") in text
    assert "Length, tokens -1.8 (-4.0 to +0.5), within noise no difference (+0.0 to +0.0)" in text
    assert "Share of repeated 4-grams +0.020, interval unknown: too few answers -" in text
    assert "Distinct 1-grams per word 0.250 - 0.125" in text and "Distinct 2-grams per word 0.500 - -" in text


def test_accuracy_on_questions_has_its_interval(shown):
    def of(count, low, high):
        return {"count": count, "total": 20, "rate": count / 20, "low": low, "high": high}

    choices = {model: {"choices": of(12, 0.387, 0.781), "choices_per_token": of(15, 0.531, 0.888)} for model in ("base", "ppo")}
    text = shown("behaviour", choices=choices)
    assert "Correct choice, log-probability 60.0% (12/20) 38.7 to 78.1 - 60.0% (12/20) 38.7 to 78.1" in text
    assert "Correct choice, log-probability per token 75.0% (15/20) 53.1 to 88.8" in text
