"""Baselines of a preference model's accuracy, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.records import Comparison, Message, PairBatch, Prompt
from jaxalign.trainers.preference_quality import length_baseline, noise_ceiling


def batch(lengths, labels):
    length = np.asarray(lengths, np.int32).reshape(-1, 2)
    return PairBatch(np.zeros((*length.shape, 1), np.int32), length, np.asarray(labels, np.float32),
                     np.ones(len(labels), np.float32))


SHORT_WINS = batch([(3, 5), (9, 4), (2, 8)], [1.0, 0.2, 0.9])
LONG_WINS = batch([(3, 5), (9, 4)], [0.1, 0.7])


def test_the_length_rule_is_chosen_on_the_training_pairs_and_measured_on_held_out_pairs():
    held_out = batch([(7, 3), (2, 6), (5, 4), (1, 9), (6, 6)], [0.9, 0.3, 0.4, 0.5, 1.0])
    # Longer is right for the first two and wrong for the third; the label 0.5 does not count; equal lengths count one half.
    longer = length_baseline(LONG_WINS, held_out)
    assert (longer["rule"], longer["pairs"], longer["accuracy"]) == ("longer", 4, 2.5 / 4)
    shorter = length_baseline(SHORT_WINS, held_out)
    assert (shorter["rule"], shorter["accuracy"]) == ("shorter", 1.5 / 4)
    # Wilson: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = 0.625, n = 4, z = 1.959964.
    assert [longer["low"], longer["high"]] == pytest.approx([0.2194, 0.9081], abs=1e-4)


def test_pairs_without_a_preference_have_no_length_baseline():
    assert length_baseline(LONG_WINS, batch([(1, 2)], [0.5])) is None
    assert length_baseline(LONG_WINS, batch([], [])) is None


def pair(label, ab=None, ba=None):
    return Comparison(Prompt("p", (Message("user", "How?"),), "human"), "a", "b", label, label_ab=ab, label_ba=ba)


def test_the_ceiling_is_the_mean_probability_of_the_preferred_answer():
    assert noise_ceiling([pair(0.9), pair(0.3), pair(1.0), pair(0.5)]) == pytest.approx((0.9 + 0.7 + 1.0) / 3)


def test_orders_that_disagree_lower_the_ceiling_and_clamped_labels_do_not():
    # (0.95 + 0.25) / 2 = 0.6; the label of the second pair was clamped from 0.97 to 0.6.
    assert noise_ceiling([pair(0.6, 0.95, 0.25), pair(0.6, 0.98, 0.96)]) == pytest.approx((0.6 + 0.97) / 2)


def test_hard_labels_have_no_ceiling():
    assert noise_ceiling([pair(1.0), pair(0.0)]) is None
    assert noise_ceiling([]) is None
