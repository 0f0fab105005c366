"""The measures of alarms on answers counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxalign.config import AlarmsConfig
from jaxalign.records import Rollout
from jaxalign.rl.alarms import AlarmRun


def measuring(**fields) -> AlarmRun:
    return AlarmRun(AlarmsConfig(every=1, **fields), None, None, 1)


def test_the_measures_are_means_over_the_answers_without_padding():
    tokens = np.array([[1, 2, 7, 7, 7, 7, 7, 7], [1, 5, 6, 2, 0, 0, 0, 0], [0] * 8], np.int32)
    rollout = Rollout(tokens, np.array([2, 1, 0]), np.array([6, 3, 0]), np.zeros((3, 6)), np.array([False, True, False]))
    answers = [("I'm sorry, but I can't help with that.", False), ("Paris.", True)]
    found = measuring().measures(rollout, answers)
    assert found == pytest.approx({"repetition": 1 / 3, "length": 4.5, "unfinished": 0.5, "refused": 0.5})


@pytest.mark.parametrize("text", [
    "I'm sorry, but I can't assist with that request.",
    "I’m sorry, I can’t help with that.",
    "Sorry, but I cannot provide that.",
    " I cannot help you with this.",
    "I can't fulfill your request.",
    "I am unable to help with that.",
    "I'm not able to discuss this topic.",
    "I must decline.",
    "Unfortunately, I am not able to answer.",
    "As an AI language model, I cannot give an opinion.",
    "I apologize, but I won't do this.",
    "I will not provide instructions.",
])
def test_refusals_of_english_chat_models_are_recognised(text):
    assert measuring().is_refusal(text)


@pytest.mark.parametrize("text", [
    "I'm sorry to hear that. Here are some ideas:",
    "Sure! I can help with that.",
    "The capital is Paris.",
    "I cannot recommend this book enough.",
    "As an AI language model, I have read many recipes. Try this one:",
    "Unfortunately, it rained.",
    "",
])
def test_other_answers_are_not_refusals(text):
    assert not measuring().is_refusal(text)


def test_patterns_of_the_user_replace_the_default():
    assert measuring(refusals=("no way",)).is_refusal("No way, friend")
    assert not measuring(refusals=("no way",)).is_refusal("I cannot help you.")
