"""From verdicts to labels: position bias, margin by the spread of the two orders, ties, and the deciding principle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from jaxalign.config import FeedbackConfig
from jaxalign.feedback.decisions import (
    Calibration,
    calibrate,
    chance_share,
    decide,
    margin_by_spread,
    position_bias,
)
from jaxalign.records import Comparison, PrincipleLabel
from tests.feedback.fakes import prompt

PLAIN = FeedbackConfig(reasoning=False, undecided_margin=0.1)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def biased(preference, bias, name="p"):
    """The label of a judge that adds `bias` to the log-odds of the answer shown first."""
    return PrincipleLabel(name, sigmoid(preference + bias), 1 - sigmoid(-preference + bias))


def pair(*labels, **fields):
    return Comparison(prompt(0), "x", "y", 0.5, decided=False, labels=labels, **fields)


def test_the_position_bias_of_a_judge_is_found_and_removed():
    preferences = np.linspace(-1.9, 1.9, 41)
    labels = [biased(x, 3.0) for x in preferences]
    assert position_bias(labels)[""] == pytest.approx(3.0)
    found = calibrate(labels, PLAIN)
    for x, label in zip(preferences, labels, strict=True):
        np.testing.assert_allclose(found.corrected(label), (sigmoid(x), sigmoid(x)), rtol=1e-6)
    # Without the correction, a preference of sigmoid(1.9) = .87 would give a label of (.993 + .25) / 2 = .62.
    assert decide(pair(labels[-1]), found, PLAIN).label == pytest.approx(sigmoid(1.9), rel=1e-5)


def test_a_principle_with_enough_labels_has_its_own_position_bias():
    labels = [biased(0.1, 1.0, "a")] * 60 + [biased(0.1, -1.0, "b")] * 60 + [biased(0.1, 1.0, "c")] * 10
    found = position_bias(labels)
    assert found["a"] == pytest.approx(1.0) and found["b"] == pytest.approx(-1.0) and "c" not in found
    assert Calibration(0.1, found).corrected(labels[-1])[0] == pytest.approx(sigmoid(0.1 + 1.0 - found[""]))


def test_the_share_of_chance_decisions_is_the_number_of_contradictions_by_the_number_of_decisions():
    # Preferences of .4 (three) and .2, contradictions of .4 and .2.
    ab = np.array([0.9, 0.9, 0.1, 0.7, 0.9, 0.7])
    ba = np.array([0.9, 0.9, 0.1, 0.7, 0.1, 0.3])
    assert chance_share(ab, ba, 0.1) == pytest.approx(2 / 4)
    assert chance_share(ab, ba, 0.3) == pytest.approx(1 / 3)
    assert chance_share(ab, ba, 0.45) is None


def test_the_margin_of_a_judge_that_is_partly_noise():
    """A fifth of the labels are certain; the others are noise of standard deviation .05 in each order."""
    rng = np.random.default_rng(0)
    noise = np.clip(0.5 + 0.05 * rng.standard_normal((2, 4000)), 0, 1)
    ab, ba = np.concatenate([noise, np.full((2, 1000), 0.95)], axis=1)
    margin, share = margin_by_spread(ab, ba, 0.05)
    # The mean of two orders has the deviation .05 / sqrt(2); of 4,000 labels about 50 may exceed the margin by chance, which is
    # the two-sided normal quantile of 1.25%, 2.5 deviations or .088.
    assert 0.06 <= margin <= 0.1 and share <= 0.05
    wrong = int((np.abs(noise.mean(axis=0) - 0.5) > margin).sum())
    assert wrong / (wrong + 1000) < 0.08


def test_a_judge_that_only_guesses_has_a_large_share_of_chance_decisions():
    ab, ba = np.random.default_rng(1).uniform(size=(2, 2000))
    _, share = margin_by_spread(ab, ba, 0.05)
    assert share > 0.3


def test_ties_do_not_count_in_the_margin_and_few_labels_give_the_fallback():
    certain = [PrincipleLabel("p", 0.9, 0.9, tie=0.05)] * 30
    leaning = [PrincipleLabel("p", 0.56, 0.44, tie=0.9)] * 300
    settings = dataclasses.replace(PLAIN, undecided_margin=None)
    assert calibrate([*certain, *leaning], settings).margin == 0.02
    assert calibrate(certain[:19], settings) == Calibration(0.1, labels=19)
    assert calibrate([PrincipleLabel("p", 0.9, None)] * 50, settings).labels == 0


def test_one_clear_principle_is_not_averaged_away():
    labels = (PrincipleLabel("tie", 0.5, None, tie=0.9), PrincipleLabel("clear", 0.9, 0.7), PrincipleLabel("weak", 0.45, 0.5))
    found = decide(pair(*labels), Calibration(0.1), PLAIN)
    assert (found.decided, found.principle, found.label, found.outcome) == (True, "clear", pytest.approx(0.8), None)
    assert (found.label_ab, found.label_ba) == (pytest.approx(0.9), pytest.approx(0.7))
    mean = decide(pair(*labels), Calibration(0.1), dataclasses.replace(PLAIN, aggregate="mean"))
    assert mean.label == pytest.approx((0.8 + 0.475) / 2)


@pytest.mark.parametrize(("aggregate", "label", "principle"), [
    ("decided", (0.8 + 0.65) / 2, "a"), ("strongest", 0.8, "a"), ("mean", (0.8 + 0.65 + 0.5) / 3, "a"),
])
def test_the_ways_to_aggregate_principles(aggregate, label, principle):
    labels = (PrincipleLabel("a", 0.9, 0.7), PrincipleLabel("b", 0.7, 0.6), PrincipleLabel("c", 0.5, 0.5))
    found = decide(pair(*labels), Calibration(0.1), dataclasses.replace(PLAIN, aggregate=aggregate))
    assert (found.label, found.principle) == (pytest.approx(label), principle)


@pytest.mark.parametrize(("labels", "outcome"), [
    ((PrincipleLabel("a", 0.9, 0.9), PrincipleLabel("b", 0.1, 0.1)), "conflict"),
    ((PrincipleLabel("a", 0.95, 0.3),), "order"),
    ((PrincipleLabel("a", 0.5, None, tie=0.9), PrincipleLabel("b", 0.5, 0.52, tie=0.8)), "tie"),
    ((PrincipleLabel("a", 0.55, 0.55),), "undecided"),
    ((PrincipleLabel("a", 0.9, None),), "none"),
])
def test_why_a_pair_is_undecided(labels, outcome):
    found = decide(pair(*labels), Calibration(0.1), PLAIN)
    assert (found.decided, found.label, found.outcome, found.principle) == (False, 0.5, outcome, None)


def test_an_inconsistent_label_counts_only_if_asked_for():
    label = PrincipleLabel("a", 1.0, 0.4)
    found = decide(pair(label), Calibration(0.1), dataclasses.replace(PLAIN, consistent=False))
    assert (found.decided, found.label) == (True, pytest.approx(0.7))


def test_deciding_again_is_idempotent():
    settings = dataclasses.replace(PLAIN, reasoning=True, undecided_margin=None)
    labels = (PrincipleLabel("a", 1.0, 0.9, 0.0, "first", "second"), PrincipleLabel("b", 0.5, None, 1.0, "third"))
    calibration = Calibration(0.05, {"": 0.3})
    once = decide(pair(*labels), calibration, settings, invert=True)
    assert (once.label, once.reasoning_ab, once.reasoning_ba) == (pytest.approx(0.1), "first", "second")
    assert decide(once, calibration, settings, invert=True) == once
