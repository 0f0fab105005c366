"""The segments of every transcript, written out by hand."""

import pytest

from jaxalign.data.chat import formats
from jaxalign.data.chat.requests import load_set
from jaxalign.errors import UserError
from jaxalign.records import Message, Principle

ASK = Message("user", "How do I use sage?")
PRINCIPLE = Principle("p", "Any fault?", "Mend it.", "Which is better?")


def test_prompt_ends_where_the_answer_begins():
    assert formats.render_prompt([ASK]) == ["<user>", "How do I use sage?", "<assistant>"]


def test_earlier_answers_end_like_sampled_ones():
    turns = [ASK, Message("assistant", "Rub it on."), Message("user", "And mint?")]
    first = ["<user>", "How do I use sage?", "<assistant>", "Rub it on.", "<end>"]
    assert formats.render_prompt(turns) == [*first, "<user>", "And mint?", "<assistant>"]


def test_dialogue_is_prompt_then_response():
    answer = "Rub it on."
    whole = formats.render_dialogue([ASK, Message("assistant", answer)])
    assert whole == formats.render_prompt([ASK]) + formats.render_response(answer)


def test_hh_style_writes_the_public_transcript():
    turns = [ASK, Message("assistant", "Rub it on."), Message("user", "Why?")]
    text = "".join(formats.render_prompt(turns, style="hh"))
    assert text == "\n\nHuman: How do I use sage?\n\nAssistant: Rub it on.\n\nHuman: Why?\n\nAssistant:"


def request(kind, **values):
    """A request of the template set "world" as segments."""
    return formats.render_request(*load_set("world").render(kind, [ASK], PRINCIPLE, **values), "compact")


def test_critique_and_revision():
    before = ["<user>", "How do I use sage?", "<assistant>", "Eat it.", "<end>"]
    asked = [*before, "<critique_request>", "Any fault?", "<critique>"]
    assert request("critique", response="Eat it.") == asked
    revision = request("revision", response="Eat it.", critique="Yes.")
    assert revision == [*asked, "Yes.", "<end>", "<revision_request>", "Mend it.", "<revision>"]


def test_comparison_with_and_without_reasoning():
    answers = {"first": "Eat it.", "second": "Rub it."}
    shown = ["<user>", "How do I use sage?", "<first>", "First: Eat it.", "<second>", "Second: Rub it."]
    shown += ["<question>", "Which is better?"]
    assert request("comparison", **answers) == [*shown, "<verdict>"]
    assert request("comparison", **answers, reasoning=True) == [*shown, "<reasoning>"]
    verdict = request("comparison", **answers, reasoning=True, thoughts="The second.")
    assert verdict == [*shown, "<reasoning>", "The second.", "<end>", "<verdict>"]


def test_empty_answers_leave_no_empty_segment():
    assert formats.render_response("") == []
    assert request("comparison", first="", second="Rub it.")[2:4] == ["<first>", "First:"]
    assert formats.render_dialogue([ASK, Message("assistant", "")]) == formats.render_prompt([ASK])


def test_a_text_that_spells_a_marker_stays_text():
    asked = formats.render_prompt([Message("user", "<critique>")])
    assert asked == ["<user>", "<", "critique>", "<assistant>"]
    assert formats.render_response("<end>") == ["<", "end>"]


def test_text_written_by_the_model_is_marked_separately_from_text_it_reads():
    review = [*request("revision", response="Eat it.", critique="Yes."), "Rub it."]
    written = [s for s, by_model in zip(review, formats.written_by_model(review), strict=True) if by_model]
    assert written == ["Eat it.", "<end>", "Yes.", "<end>", "Rub it."]
    judged = [*request("comparison", first="Eat it.", second="Rub it.", reasoning=True, thoughts="The second."), "(B)"]
    written = [s for s, by_model in zip(judged, formats.written_by_model(judged), strict=True) if by_model]
    assert written == ["The second.", "<end>", "(B)"]
    assert formats.written_by_model(["Sage does dogs good."]) == [True]


@pytest.mark.parametrize(
    ("messages", "style", "sentence"),
    [
        ([], "compact", "no messages"),
        ([ASK], "chatml", "'chatml' is not a prompt style"),
        ([Message("system", "x"), ASK], "compact", "has a system message"),
        ([ASK, Message("assistant", "x")], "compact", "must be from 'user'"),
    ],
)
def test_mistakes_are_named(messages, style, sentence):
    with pytest.raises(UserError, match=sentence):
        formats.render_prompt(messages, style)
