"""The sentences on rows that cannot be used."""

from __future__ import annotations

import re
import types

import pytest

from jaxalign import reasons
from jaxalign.tracking import accuracy


def test_a_sentence_counts_the_usable_rows_and_explains_each_reason():
    sentence = reasons.usable_sentence("revisions", 1200, 1150, {"cut_off": 40, "empty": 10})
    assert sentence == ("1,150 of 1,200 revisions can be trained on; left out: 40 cut_off (the text reached the length limit), "
                        "10 empty (the text is empty)")
    assert reasons.usable_sentence("revisions", 3, 3, {}) == "3 of 3 revisions can be trained on"


@pytest.mark.parametrize(("total", "usable", "sentence"), [
    (100, 63, "only 63 rows can be trained on, fewer than sft.min_rows (64)"),
    (200, 64, "only 32% of the rows can be trained on, less than sft.min_share (50%)"), (128, 64, None)])
def test_few_usable_rows_are_reported(total, usable, sentence):
    assert reasons.few_usable(types.SimpleNamespace(min_rows=64, min_share=0.5), total, usable) == sentence


def compared(**fields):
    """A summary of stage compare without warnings, with these fields."""
    return {"pairs": 100, "outcomes": {}, "order_agreement": None, "position_bias": None,
            "calibration": {"chance_share": None}} | fields


def test_few_decided_pairs_are_reported_with_a_remedy():
    sentence = "only 9 of 100 pairs have a decided label: raise compare.temperature"
    assert reasons.label_warnings(compared(outcomes={"identical": 91})) == [sentence]
    assert reasons.label_warnings(compared(outcomes={"identical": 90})) == []


@pytest.mark.parametrize(("reason", "warned"), [("unreadable", True), ("missing_answer", True), ("undecided", False)])
def test_pairs_that_mostly_have_no_verdict_are_reported(reason, warned):
    """A label that is undecided is a verdict; an answer of the judge that cannot be read is none."""
    warnings = reasons.label_warnings(compared(outcomes={reason: 51}))
    assert [warning[:62] for warning in warnings] == warned * [
        "51 of 100 pairs have no answers, or no verdict that could be r"]
    assert reasons.label_warnings(compared(outcomes={reason: 50})) == []


def test_a_share_of_usable_rows_below_the_required_one_is_named_with_its_field():
    assert reasons.too_few(3584, 29, "sft.required_share", 0.05) == (
        "config.sft.required_share is 0.05, but only 29 of 3,584 rows (0.8%) can be used")
    assert reasons.too_few(100, 5, "sft.required_share", 0.05) is None and reasons.too_few(0, 0, "x", 0.05) is None


@pytest.mark.parametrize("outcome", ["undecided", "order"])
def test_a_judge_that_prefers_a_position_is_named_as_the_reason(outcome):
    summary = compared(outcomes={outcome: 95}, order_agreement=0.25, position_bias=-0.3)
    [warning] = reasons.label_warnings(summary)
    assert "prefers the answer shown second, whatever it says" in warning
    assert "for 75% of the pairs" in warning


@pytest.mark.parametrize(("outcome", "sentence"), [
    ("order", "the judge prefers the other answer when they are shown in the other order for 6 of 10 pairs of sft and base"),
    ("unreadable", "the judge gave no verdict on 6 of 10 pairs of sft and base"), ("tie", None)])
def test_a_win_rate_that_says_little_is_reported(outcome, sentence):
    """A win rate near 50% from contradictions or missing verdicts is no draw."""
    warning = reasons.verdict_warning({"total": 10, "outcomes": {outcome: 6}}, "sft and base")
    assert warning is None if sentence is None else warning.startswith(sentence)
    assert reasons.verdict_warning({"total": 10, "outcomes": {outcome: 5}}, "sft and base") is None


def test_every_reason_has_a_remedy():
    for name in {**reasons.REVISION, **reasons.COMPARISON}:
        assert reasons.advice({name: 1}) != reasons.advice({})


@pytest.mark.parametrize(("mass", "sentence"), [(None, None), (0.5, None), (0.984, "the judge gave 98% of its probability")])
def test_verdicts_of_a_judge_that_writes_something_else_are_warned_about(mass, sentence):
    warnings = reasons.label_warnings(compared(outside_mass=mass))
    assert warnings == [] if sentence is None else [warning.startswith(sentence) for warning in warnings] == [True]


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.05, False), (0.2, False), (0.6, True)])
def test_labels_that_are_mostly_due_to_chance_are_warned_about(share, warned):
    warnings = reasons.label_warnings(compared(calibration={"chance_share": share}))
    assert len(warnings) == int(warned)
    assert not warned or warnings[0].startswith("about 60% of the decided labels are due to chance")


def test_compared_answers_that_mostly_did_not_end_are_warned_about():
    """80 pairs were compared, so 81 of 160 answers are more than half."""
    assert reasons.label_warnings(compared(identical_pairs=20, incomplete=80), 64) == []
    assert reasons.label_warnings(compared(identical_pairs=20, incomplete=81), 64) == [
        "81 of 160 compared answers did not end within compare.max_new_tokens (64), but training treats them as complete; "
        "raise it, or start from a model that ends its answers"]


def test_the_sentence_on_the_agreement_of_the_judge_with_itself():
    summary = {"order_agreement": 0.914, "calibration": {"margin": 0.13, "chance_share": 0.041}}
    assert reasons.self_agreement_sentence(summary) == (
        "the labeller agrees with itself on 91% of the verdicts that it gave in both orders; a label is decided if it differs "
        "from 0.5 by more than 0.13, where about 4% of the labels are due to chance"
    )


def _audit(rate, low, high, flips=0.0, total=20):
    accuracy = {"total": total, "rate": rate, "low": low, "high": high}
    return {"pairs": 30, "ties": 10, "accuracy": accuracy, "flips": {"total": 20, "rate": flips}}


@pytest.mark.parametrize(("audit", "words"), [
    (_audit(0.8, 0.58, 0.92), []),
    (_audit(0.6, 0.39, 0.78), ["in 60% of the 20 gold pairs that it decides (95% interval 39% to 78%), which may be chance"]),
    (_audit(0.1, 0.03, 0.3), ["which is worse than chance"]),
    (_audit(None, 0, 1, total=0), ["decides none of the 20 gold pairs with a better answer"]),
    (_audit(0.8, 0.58, 0.92, flips=0.3), []),
    (_audit(0.8, 0.58, 0.92, flips=0.35), ["for 35% of the gold pairs that the judge decides in both orders"]),
])
def test_a_judge_that_fails_its_audit_is_warned_about(audit, words):
    found = reasons.audit_warnings(audit)
    assert len(found) == len(words) and all(part in sentence for part, sentence in zip(words, found, strict=True))


def preference_summary(accuracy, low, high, length=0.5, rule="longer"):
    baseline = {"rule": rule, "pairs": 100, "accuracy": length, "low": length - 0.1, "high": length + 0.1}
    return {"held_out": {"pairs": 100, "accuracy": accuracy, "low": low, "high": high},
            "baselines": {"chance": 0.5, "length": baseline, "ceiling": 0.8}}


def test_the_accuracy_of_the_preference_model_is_compared_with_its_baselines():
    assert accuracy.accuracy_sentence(preference_summary(0.7, 0.6, 0.78, 0.55)) == (
        "held-out accuracy 70.0% (95% interval 60.0% to 78.0%) on 100 pairs; the rule that the longer answer is better reaches "
        "55.0% (95% interval 45.0% to 65.0%), chance 50.0%; the noise of the labels allows an expected 80.0%")


@pytest.mark.parametrize(("summary", "sentence"), [
    (preference_summary(0.7, 0.6, 0.78), None),
    (preference_summary(0.7, 0.6, 0.78, 0.59), None),
    (preference_summary(0.55, 0.45, 0.65), "not reliably better than chance, which reaches 50.0%.*narrower interval"),
    (preference_summary(0.7, 0.6, 0.78, 0.72, "shorter"),
     "than the rule that the shorter answer is better, which reaches 72.0%.*on 100 pairs; give more pairs to train on"),
    ({"held_out": None, "baselines": {"chance": 0.5, "length": None, "ceiling": None}}, "accuracy .* is unknown"),
])
def test_a_preference_model_that_does_not_beat_its_baselines_is_reported(summary, sentence):
    found = accuracy.uninformative(summary)
    assert found is None if sentence is None else re.search(sentence, found)


def dpo_summary(right, pairs, low, high):
    return {"held_out": {"pairs": pairs, "accuracy": right / pairs, "low": low, "high": high, "margin": 0.1}}


@pytest.mark.parametrize(("summary", "sentence"), [
    (dpo_summary(70, 100, 0.604, 0.781), None),
    (dpo_summary(49, 100, 0.394, 0.587),
     "the implicit reward is not reliably better than chance: its held-out accuracy is 49.0% (95% interval 39.4% to 58.7%) on "
     "100 pairs; give more pairs to train on, train for more epochs (dpo.epochs), or correct the labels"),
    (dpo_summary(7, 10, 0.397, 0.892),
     "the implicit reward is not reliably better than chance: its held-out accuracy is 70.0% (95% interval 39.7% to 89.2%) on "
     "10 pairs; hold out more pairs for a narrower interval, or give more pairs to train on"),
    ({"held_out": None},
     "the accuracy of the implicit reward is unknown, because no held-out pair has a label that prefers an answer; give more "
     "pairs, or raise held_out_share"),
    ({"held_out": None, "balance": {}}, None),
    ({"held_out": {"desirable": 5, "undesirable": 5, "accuracy": 0.4, "margin": 0.0}, "balance": {}}, None),
])
def test_a_direct_policy_that_does_not_beat_chance_is_reported(summary, sentence):
    """The intervals are Wilson's at 95%. Judged single answers have none."""
    assert accuracy.unlearnt(summary) == sentence
