"""The choice of the two answers that are compared."""

from __future__ import annotations

import pytest

from jaxalign.feedback.critique import PolicyAnswer
from jaxalign.feedback.labeller import choose_pair


def answers(*texts, logprobs=None):
    logprobs = logprobs or [0.0] * len(texts)
    return [PolicyAnswer(text, True, sampled=text != "-", mean_logprob=x) for text, x in zip(texts, logprobs, strict=True)]


@pytest.mark.parametrize(("how", "expected"), [("first", (0, 2)), ("different", (0, 3)), ("uncertain", (0, 3))])
def test_two_different_answers_are_chosen(how, expected):
    said = answers("the cat sat", "the cat sat", "the cat ran", "a dog ate", logprobs=[-2.0, -1.0, -0.5, -3.0])
    assert choose_pair(said, how) == expected


def test_equal_answers_are_chosen_only_if_all_are_equal():
    assert choose_pair(answers("a", "a", "a"), "different") == (0, 1)
    assert choose_pair(answers("a", "a", "b"), "first") == (0, 2)


def test_missing_answers_are_not_chosen():
    assert choose_pair(answers("-", "a", "b"), "different") == (1, 2)
    assert choose_pair(answers("-", "a"), "first") is None
