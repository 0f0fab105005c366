"""Which labels are right by the gold judge, on handwritten answers."""

from __future__ import annotations

import pytest

from jaxalign.data.world.label_scores import axes_of, label_quality, outcome
from jaxalign.records import Comparison, Message, Prompt
from tests.data.handwritten import GOOD_REFUSAL, HELP_DOGS, HELP_ROSES, HOSTILE, PLAIN, WORLD

EVASION = "I cannot talk about that."
RUDE = "You fool. "


def about(text):
    return Prompt("p", (Message("user", text),), "compare")


@pytest.mark.parametrize(("text", "preferred", "other", "axes", "expected"), [
    (HOSTILE, GOOD_REFUSAL, HELP_ROSES, ("harm",), "right"),
    (HOSTILE, HELP_ROSES, GOOD_REFUSAL, ("harm",), "wrong"),
    (PLAIN, HELP_DOGS, EVASION, ("harm",), "right"),
    # Both refuse harm; only one gives a reason and an alternative.
    (HOSTILE, GOOD_REFUSAL, EVASION, ("harm",), "equal"),
    (HOSTILE, GOOD_REFUSAL, EVASION, ("harm", "refusal"), "right"),
    # The preferred answer is better on harm and worse on courtesy: right on one of the axes, wrong on the other.
    (HOSTILE, RUDE + GOOD_REFUSAL, HELP_ROSES, ("harm", "courtesy"), "right"),
    (HOSTILE, RUDE + GOOD_REFUSAL, HELP_ROSES, ("courtesy",), "wrong"),
    (HOSTILE, GOOD_REFUSAL, HELP_ROSES, (), "equal"),
])
def test_a_label_is_right_if_the_preferred_answer_is_better_on_an_axis(text, preferred, other, axes, expected):
    assert outcome(WORLD, about(text), preferred, other, axes) == expected


def test_principles_have_the_axis_in_their_names():
    assert axes_of(["harm-2", "courtesy-1", "harm-1", "brevity-1"]) == ("harm", "courtesy")


def pair(first, second, sides, decided=True, principles=("harm-1", "courtesy-2"), principle="harm-1"):
    return Comparison(about(HOSTILE), first, second, 0.5, principles, *sides, decided=decided, principle=principle)


def test_the_counts_of_labels():
    """An inverted label counts as the judge gave it; equal answers and undecided pairs are no labels."""
    found = label_quality(WORLD, [
        pair(GOOD_REFUSAL, HELP_ROSES, (0.9, 0.8)),
        pair(HELP_ROSES, GOOD_REFUSAL, (0.1, 0.2)),
        pair(GOOD_REFUSAL, RUDE + GOOD_REFUSAL, (0.7, 0.9)),
        pair(GOOD_REFUSAL, RUDE + HELP_ROSES, (0.2, 0.1), principle="courtesy-2"),
        pair(GOOD_REFUSAL, HELP_ROSES, (0.5, 0.5), decided=False, principle=None),
        pair(GOOD_REFUSAL, GOOD_REFUSAL, (None, None), decided=False, principle=None),
        pair(GOOD_REFUSAL, HELP_ROSES, (0.9, 0.8), principles=("brevity",), principle="brevity"),
    ])
    assert (found["pairs"], found["decided"]) == (5, 4)
    assert found["any_axis"] == {"right": 3, "wrong": 1, "equal": 0}
    # On the axis of the deciding principle, harm, the third pair is equal.
    assert found["deciding_axis"] == {"right": 2, "wrong": 1, "equal": 1}
