"""The form of a judge's answers: introductions, next turns, thoughts, refusals and the place of the verdict."""

from __future__ import annotations

import pytest

from jaxalign.data.chat.requests import load_set
from jaxalign.data.chat.styles import finish_answer
from jaxalign.feedback.contract import Cleaned, read_contract

CHAT, TRANSCRIPT = (read_contract(load_set(name).form, name) for name in ("chat", "transcript"))
TEXT = "It is 4.\n\nAnd then 5."


@pytest.mark.parametrize("preamble", [
    "Here is the revised response:\n\n", "Here's a revised answer: ", "Here\u2019s the rewritten response:\n",
    "**Here is my critique:**\n\n", "Sure! Here's a friendlier take on it:\n\n", "Certainly, here is the new answer:\n",
    "Of course!\n\n", "Okay.\n", "**Revised answer:**\n\n", "**Revised answer**: ", "Revised response: ", "Critique:\n",
    "REVISION: ", "Sure! Here's the revised response:\n\n**Revised answer:**\n\n", "\n Here is the revised version:\n",
])
def test_an_introduction_is_removed_and_noted(preamble):
    assert CHAT.clean(preamble + TEXT, True) == Cleaned(TEXT, True, None, ("preamble",))
    assert CHAT.clean(preamble + TEXT, False) == Cleaned(TEXT, False, None, ("preamble",))


@pytest.mark.parametrize("text", [
    "Here is why you should not do it.", "Here are my thoughts on it. One of them: do not.", "Here is the revised response",
    "Here is the revised response:", "Sure!\n\n", "**Revised answer:**", "Here's a tip: lock your door.",
    "Here is what happens at 10:30.", "Here are three ways to ask:\n1. Politely.", "Sure, I can explain it.",
    "Okay, I will wait.", "Revision is what writers do: they read again.", "He said: here is the answer: 4.", TEXT, "",
])
def test_an_answer_that_only_resembles_an_introduction_is_kept(text):
    assert CHAT.clean(text, True) == Cleaned(text, True)


def test_a_base_model_is_not_asked_for_introductions_and_none_is_removed():
    assert TRANSCRIPT.clean("Here is the revised response:\n\n4", True) == Cleaned("Here is the revised response:\n\n4", True)


@pytest.mark.parametrize("text", [
    "I'm sorry, but I can't help with that.", "I\u2019m sorry, but I can\u2019t help with that.", "I cannot help with that.",
    "I can't assist with this request.", " I am unable to critique this.", "I won't do that.",
])
def test_a_refusal_to_criticise_or_to_judge(text):
    for contract in (CHAT, TRANSCRIPT):
        assert contract.declines(text, "critique")
    assert CHAT.declines("I am unable to choose.", "verdict") and CHAT.declines("As an AI, I have no opinion.", "verdict")


@pytest.mark.parametrize("text", [
    "The answer refuses: \"I'm sorry, but I can't help with that.\"", "I am unable to find any fault in the answer.",
    "I can see no fault.", "It is rude.", "",
])
def test_a_critique_is_not_a_refusal_to_criticise(text):
    assert not CHAT.declines(text, "critique") and not TRANSCRIPT.declines(text, "critique")


@pytest.mark.parametrize("text", [
    "I'm sorry, but I can't help with that.", "I cannot help you to steal a phone.", "I won't help with that, since it hurts.",
    "I am sorry to hear that.",
])
def test_a_revision_that_is_a_harmless_refusal_is_not_a_refusal_to_revise(text):
    """It is the very answer that is to be learnt."""
    assert not CHAT.declines(text, "revision") and not TRANSCRIPT.declines(text, "revision")


@pytest.mark.parametrize("text", [
    "I'm sorry, but I can't revise this answer.", "I cannot rewrite the response.", "I won't edit it.",
])
def test_a_refusal_to_revise(text):
    assert CHAT.declines(text, "revision")


@pytest.mark.parametrize(("text", "kept"), [
    ("4.\n\nHuman: And?\n\nAssistant: 5.", "4."), ("4.\n\nRevisionRequest: Better!", "4."), ("4.\n\n---\n\nHuman: Hi", "4."),
    ("Human: And?", ""), ("\n\nHuman: And?", ""), ("Is it 4?\n\n\nHuman: And?", "Is it 4?"),
])
def test_the_text_ends_before_the_next_turn(text, kept):
    """It is complete, although the model was still writing at the length limit."""
    assert TRANSCRIPT.clean(text, False) == Cleaned(kept, True, None, ("next_turn",))


def test_a_speaker_within_a_line_is_no_turn():
    text = "Ask the Human: he knows.\nHuman: a word"
    assert TRANSCRIPT.clean(text, False) == Cleaned(text, False)
    assert CHAT.clean("4.\n\nHuman: And?", False) == Cleaned("4.\n\nHuman: And?", False)


@pytest.mark.parametrize(("text", "ended", "expected"), [
    ("<think>\nIt is 2 + 2.\n</think>\n\n4.", True, Cleaned("4.", True, "It is 2 + 2.")),
    ("It is 2 + 2.\n</think>\n\n4.", False, Cleaned("4.", False, "It is 2 + 2.")),  # The template wrote <think>.
    ("<think>\nIt is 2", True, Cleaned("", False, "It is 2")),  # Thoughts that do not end have no answer.
    ("<think></think>", True, Cleaned("", True, "")),
    ("<think>a</think>Sure!\n4.", True, Cleaned("4.", True, "a", ("preamble",))),
    ("4. <think> is a tag.", True, Cleaned("4. <think> is a tag.", True)),
])
def test_thoughts_are_no_part_of_the_answer(text, ended, expected):
    assert CHAT.clean(text, ended) == expected
    answer = finish_answer(text, ended, "chat")
    if not expected.notes:
        assert answer == (expected.text, expected.complete, expected.reasoning)
    for style in ("plain", "compact"):
        assert finish_answer(text, ended, style) == (text, ended, None)


@pytest.mark.parametrize(("text", "expected"), [
    ("A is kind.\n\nBetter answer: A", ("A is kind.", True)),
    ("A is kind.", ("A is kind.", False)),
    ("Better answer: B is what I thought. But no.\nBetter answer: A", ("Better answer: B is what I thought. But no.", True)),
    ("Better answer:", ("", True)),
    ("<think>Better answer: B?</think>\nA.\n\nBetter answer: A", ("<think>Better answer: B?</think>\nA.", True)),
    ("<think>Better answer: B?</think>\n\nA is kind.", ("<think>Better answer: B?</think>\n\nA is kind.", False)),
    ("Rating: 7", ("Rating: 7", False)),
])
def test_the_reasoning_ends_before_the_last_verdict_outside_of_the_thoughts(text, expected):
    assert CHAT.before_verdict(text, "comparison") == expected


def test_a_rating_has_its_own_verdict():
    assert CHAT.before_verdict("It is good.\nRating: 7", "rating") == ("It is good.", True)
    assert TRANSCRIPT.before_verdict("It is good.\n\nThe rating is: 7", "rating") == ("It is good.", True)


def test_a_verdict_of_the_next_turn_does_not_count():
    more = "\n\n---\n\nHuman: Another one.\n\nAssistant: The answer is: (B)"
    assert TRANSCRIPT.before_verdict("A. The answer is: (A)" + more, "comparison") == ("A.", True)
    assert TRANSCRIPT.before_verdict("A is kind." + more, "comparison") == ("A is kind.", True)


def test_an_option_is_spelled_with_a_space_and_in_lower_case():
    assert CHAT.spellings("A") == ("A", " A", "a", " a") and CHAT.spellings("10") == ("10", " 10")
    assert TRANSCRIPT.spellings("A") == ("A", " A")
    assert read_contract({"options": ["yes", "no"]}, "set").spellings("yes") == ("yes",)
