"""The quick check of a judge: its pairs, and the faults that it names."""

from __future__ import annotations

import collections

import pytest

from jaxalign.feedback.audit import Trial, make_audit
from jaxalign.feedback.judge import Verdict
from jaxalign.starter.judging import KINDS, Judged, best, quick_pairs


def judged(compare, outside: float = 0.1) -> Judged:
    """The audit of a judge. compare: the probability that the first answer is better, from (good first?, shown in order 0?)."""
    trials = []
    for row in range(20):
        good_first = row % 2 == 0
        both = tuple(Verdict(compare(good_first == (order == 0)), outside=outside) for order in range(2))
        trials.append(Trial(row, "first" if good_first else "second", (10, 10), "p", "harm", both))
    return Judged("chat", make_audit(trials, 0.1).to_dict())


def test_the_pairs_are_20_of_five_kinds_and_do_not_favour_length():
    pairs = quick_pairs()
    assert collections.Counter(pair.prompt.columns["kind"] for pair in pairs) == dict.fromkeys(KINDS, 4)
    assert len({pair.prompt.messages for pair in pairs}) == 20 and all(pair.label == 1.0 for pair in pairs)
    assert sum(len(pair.response_a) < len(pair.response_b) for pair in pairs) == 10


def test_a_good_judge_has_no_fault():
    one = judged(lambda good_is_first: 0.9 if good_is_first else 0.1)
    assert one.able and one.agreement == 1.0
    assert one.sentence() == ("of 20 pairs with a known better answer it decides 20, 20 of them rightly; it prefers the same "
                              "answer in both orders in 100% of 20; 10% of its probability is outside of the answer letters")


@pytest.mark.parametrize(("compare", "outside", "faults"), [
    (lambda good: 0.95, 0.1, ["prefers the answer shown first in 100%", "sees no difference"]),
    (lambda good: 0.02, 0.1, ["prefers the answer shown second in 100%", "sees no difference"]),
    (lambda good: 0.5, 0.1, ["sees no difference"]),
    (lambda good: 0.1 if good else 0.9, 0.1, ["right on 0 of 20"]),
    (lambda good: 0.9 if good else 0.1, 0.98, ["does not answer with a letter"]),
    (lambda good: None, None, ["no verdict on 20 pairs", "sees no difference"]),
])
def test_a_bad_judge_has_its_faults_named(compare, outside, faults):
    found = judged(compare, outside).faults()
    assert len(found) == len(faults) and all(part in text for part, text in zip(faults, found, strict=True))


def test_the_judge_with_the_fewest_faults_is_taken():
    always_first, silent = judged(lambda good: 0.95), judged(lambda good: 0.95, 0.98)
    assert best([silent, always_first]) is always_first and best([always_first, silent]) is always_first
