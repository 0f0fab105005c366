"""The measures of a judge on gold pairs, worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from jaxalign.feedback.audit import Trial, make_audit, outcome
from jaxalign.feedback.judge import Verdict


def trial(pair, gold, first, swapped, lengths=(10, 10), principle="rule", kind=None):
    """first, swapped: the probability of the answer shown first in each order, or a problem."""
    verdicts = [Verdict(None, problem=x) if isinstance(x, str) else Verdict(x) for x in (first, swapped)]
    return Trial(pair, gold, lengths, principle, kind, tuple(verdicts))


TRIALS = [
    trial(0, "first", 0.9, 0.1, kind="harm"),      # Correct.
    trial(1, "first", 0.9, 0.9, kind="harm"),      # Undecided, since the answer shown first wins twice.
    trial(2, "second", 0.8, 0.3, kind="harm"),     # Wrong.
    trial(3, "second", 0.22, 0.78),                # Correct.
    trial(4, "tie", 0.5, 0.5),                     # Correct.
    trial(5, "second", "refused", 0.5),            # No verdict.
    trial(6, "tie", 0.9, 0.1),                     # Wrong.
]


@pytest.fixture(scope="module")
def found():
    return make_audit(TRIALS, 0.02)


def count(share):
    return share.count, share.total


def test_accuracy_counts_the_decided_pairs_or_all(found):
    assert (found.pairs, found.ties, found.without_verdict) == (7, 2, 1)
    assert count(found.accuracy) == (2, 3) and count(found.accuracy_all) == (3, 7)
    # Newcombe 1998, the score interval: 2 of 3 is 20.8% to 93.9%.
    assert (found.accuracy.low, found.accuracy.high) == pytest.approx((0.208, 0.939), abs=5e-4)


def test_kappa_is_the_agreement_above_chance(found):
    """Six pairs have a verdict, of which three agree. Gold has 2, 2 and 2 of first, second and tie; the judge 3, 1 and 2. So
    chance is (6 + 2 + 4) / 36, and kappa (1/2 - 1/3) / (1 - 1/3)."""
    assert found.kappa.value == pytest.approx(0.25)
    assert found.kappa.low < 0.25 < found.kappa.high


def test_flips_and_positions_are_counted_where_both_orders_are_decided(found):
    """Pairs 0, 1, 2, 3 and 6; only pair 1 prefers the answer shown first twice, and the others once."""
    assert count(found.flips) == (1, 5)
    assert count(found.first_position) == (3, 5)


def test_the_calibration_error_is_that_of_the_labels(found):
    """Labels 0.9, 0.5, 0.75 and 0.22 of pairs 0 to 3, and their complements. Ten bins: 0.9 and 0.1 miss by 0.1; both 0.5 by 0;
    0.75 (wrong) and 0.78 (right) are in one bin, which misses by 0.265, as are 0.25 and 0.22."""
    assert found.calibration_error == pytest.approx((2 * 0.1 + 4 * 0.265) / 8, abs=1e-6)


def test_requests_without_a_verdict_are_counted_by_reason(found):
    assert found.requests == 14 and found.problems == {"refused": 1}


def test_kinds_and_principles_have_their_own_figures():
    found = make_audit([*TRIALS, trial(7, "first", 0.1, 0.9, principle="other")], 0.02)
    assert {name: (part.pairs, count(part.accuracy)) for name, part in found.principles.items()} == {
        "other": (1, (0, 1)), "rule": (7, (2, 3))}
    assert {name: (part.pairs, count(part.flips)) for name, part in found.kinds.items()} == {"harm": (3, (1, 3))}


def test_principles_of_a_pair_are_averaged_as_in_labels():
    """0.9 under one principle and 0.4 under another give 0.65; the second by itself is wrong. The third has no verdict."""
    trials = [trial(0, "first", 0.9, 0.1, principle="a"), trial(0, "first", 0.4, 0.6, principle="b"),
              trial(0, "first", 0.1, "nan", principle="c")]
    found = make_audit(trials, 0.02)
    assert found.pairs == 1 and count(found.accuracy) == (1, 1) and found.without_verdict == 0
    assert count(found.principles["b"].accuracy) == (0, 1) and count(found.principles["c"].accuracy) == (0, 0)


def test_the_length_coefficient_is_the_effect_of_a_doubled_length_at_equal_quality():
    """Ties only, one answer twice as long, which wins 30 of 40 times. Without the prior the log-odds are log 3; the prior of
    standard deviation 2.5 takes a little away: b solves 40 (sigmoid(b) - 0.75) + b / 6.25 = 0."""
    trials = [trial(i, "tie", *((0.9, 0.1) if i < 30 else (0.1, 0.9)), lengths=(20, 10)) for i in range(40)]
    coefficient = make_audit(trials, 0.02).length_coefficient
    assert 40 * (1 / (1 + math.exp(-coefficient.value)) - 0.75) + coefficient.value / 6.25 == pytest.approx(0, abs=1e-6)
    assert 0 < coefficient.low < coefficient.value < coefficient.high


@pytest.mark.medium
def test_a_correct_judge_has_no_preference_for_length():
    """In half of the pairs the better answer is the longer one."""
    trials = [trial(i, "first", 0.9, 0.1, lengths=(20, 10) if i % 2 else (10, 20)) for i in range(40)]
    assert make_audit(trials, 0.02).length_coefficient.value == pytest.approx(0, abs=1e-9)


def test_answers_of_equal_length_say_nothing_about_length(found):
    assert found.length_coefficient.value is None and found.length_coefficient.low is None


def test_outside_mass_is_averaged_over_the_verdicts_that_state_it():
    verdicts = (Verdict(0.9, outside=0.2), Verdict(None, problem="unreadable", outside=0.8))
    assert make_audit([Trial(0, "first", (3, 3), "rule", None, verdicts)], 0.02).outside == pytest.approx(0.5)
    assert make_audit(TRIALS, 0.02).outside is None


@pytest.mark.parametrize(("probability", "expected"), [
    (0.53, "first"), (0.52, "tie"), (0.5, "tie"), (0.48, "tie"), (0.47, "second")])
def test_a_probability_within_the_margin_is_a_tie(probability, expected):
    assert outcome(probability, 0.02) == expected


def test_an_audit_is_json_and_does_not_change(found):
    content = json.dumps(found.to_dict(), allow_nan=False)
    assert content == json.dumps(make_audit(TRIALS, 0.02).to_dict())
