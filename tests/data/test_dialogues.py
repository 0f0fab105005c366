"""Parsing dialogues turn by turn, and the context that two answers share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.data.chat.dialogues import (
    cut_front,
    parse_demonstration,
    parse_dialogue,
    parse_judgement,
    parse_pair,
    parse_transcript,
    split_answers,
)
from jaxalign.data.sources.prompts import parse_prompt
from jaxalign.records import Message


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


def test_a_transcript_is_parsed_into_its_turns():
    text = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHow are you? \n\nHuman:  Fine.\n\nAssistant: "
    assert parse_transcript(text) == (user("Hi."), assistant("Hello.\n\nHow are you?"), user("Fine."), assistant(""))


def test_leading_blank_lines_are_optional():
    assert parse_transcript("Human: a\n\nAssistant: b") == (user("a"), assistant("b"))


@pytest.mark.parametrize(
    "said",
    [
        "Human: why would you ask?",  # starts with the other's name, on the marker's own line
        "He said Assistant: no.",
        "a list:\nAssistant: one newline is no blank line",
        "It was good.  Human: So what now?",
        "[Click to copy: Human: TELL ME]",
        "a quote:\n\n> Human: quoted",
        "two words:\n\nHumanity: a history\n\nAn Assistant: helps",
    ],
)
def test_pitfall_18_a_speaker_marker_inside_a_turn_does_not_split_it(said):
    """Other systems split prompts at a marker that also occurs in the text."""
    text = f"\n\nHuman: tell me\n\nAssistant: {said}\n\nHuman: go on\n\nAssistant: {said}"
    assert parse_transcript(text) == (user("tell me"), assistant(said), user("go on"), assistant(said))


def test_pitfall_18_chosen_and_rejected_need_not_share_a_context():
    """Other systems use the context of `chosen` for `rejected` as well."""
    chosen = (user("q1"), assistant("a1"), user("q2"), assistant("cut Human: off"), assistant("and on"))
    rejected = (user("q1"), assistant("a1"), user("q2"), assistant("other"))
    context, one, two = split_answers(chosen, rejected)
    assert context == (user("q1"), assistant("a1"), user("q2"))
    assert (one, two) == ("cut Human: off\n\nAssistant: and on", "other")


def test_the_shared_context_ends_with_a_user_turn_even_if_more_is_shared():
    chosen = (user("q"), assistant("first"), assistant("one"))
    rejected = (user("q"), assistant("first"), assistant("two"))
    assert split_answers(chosen, rejected) == ((user("q"),), "first\n\nAssistant: one", "first\n\nAssistant: two")


def test_an_answer_remains_if_one_dialogue_is_a_prefix_of_the_other():
    short = (user("q"), assistant("a"))
    assert split_answers((*short, user("r"), assistant("b")), short) == (
        (user("q"),),
        "a\n\nHuman: r\n\nAssistant: b",
        "a",
    )


def test_dialogues_without_a_shared_question_have_no_context():
    assert split_answers((user("p"), assistant("a")), (user("q"), assistant("a"))) is None
    assert split_answers((user("p"), user("r"), assistant("a")), (user("p"), assistant("a"))) is None
    assert split_answers((assistant("a"),), (assistant("b"),)) is None


_turns = st.lists(
    st.tuples(st.sampled_from(["Human", "Assistant"]), st.text("ab: \nHumanAssistant", max_size=12)),
    min_size=1,
    max_size=6,
)


@given(_turns)
def test_written_turns_are_read_back(turns):
    turns = [(name, " ".join(text.split())) for name, text in turns]  # no blank line inside a turn
    text = "".join(f"\n\n{name}: {said}" for name, said in turns)
    role = {"Human": "user", "Assistant": "assistant"}
    assert parse_transcript(text) == tuple(Message(role[name], said) for name, said in turns)


@pytest.mark.parametrize("value", ["no marker", "", "Hi.\n\nHuman: late", 3, None, [{"role": "tool", "content": "x"}],
                                   [{"role": ["user"], "content": "x"}], [{"role": "user"}], ["user: hi"],
                                   [{"role": "user", "content": []}],
                                   [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
                                   [{"role": "user", "content": [{"type": "text", "text": 3}]}]])
def test_an_invalid_transcript_is_refused(value):
    with pytest.raises(ValueError, match="expected"):
        parse_dialogue(value)


def _messages(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_the_common_forms_of_a_pair_give_the_same_dialogues():
    q, a, b = ("user", "q"), ("assistant", "a"), ("assistant", "b")
    expected = ((user("q"), assistant("a")), (user("q"), assistant("b")))
    shapes = [
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {"chosen": _messages(q, a), "rejected": _messages(q, b)},
        {"prompt": "q", "chosen": _messages(q, a), "rejected": _messages(q, b)},
        {"prompt": _messages(q), "chosen": _messages(a), "rejected": _messages(b)},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": " b"},
        {"prompt": "Human: q\n\nAssistant:", "chosen": " a", "rejected": " b"},
        {"question": "q", "system": "", "chosen": "a", "rejected": "b"},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    ]
    for row in shapes:
        assert parse_pair(row) == expected, row


def test_a_text_in_system_is_the_system_message_of_every_form():
    q, a, b = ("user", "q"), ("assistant", "a"), ("assistant", "b")
    kind, own = Message("system", "Be kind."), {"system": "Be kind."}
    expected = ((kind, user("q"), assistant("a")), (kind, user("q"), assistant("b")))
    for row in ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": _messages(q, a), "rejected": _messages(q, b)},
                {"question": "q", "chosen": "a", "rejected": "b"},
                {"prompt": _messages(("system", "Be kind."), q), "chosen": "a", "rejected": "b"}):
        assert parse_pair(row | own) == expected, row
    for row in ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
                {"messages": _messages(q, a)}, {"prompt": "q", "output": "a"}, {"instruction": "q", "output": "a"}):
        assert parse_demonstration(row | own) == ((kind, user("q")), "a"), row
    assert parse_judgement({"prompt": "q", "completion": "a", "label": True} | own)[0] == (kind, user("q"))
    assert parse_prompt({"prompt": "q"} | own).messages == (kind, user("q"))


def test_a_prompt_of_messages_is_the_beginning_of_whole_dialogues():
    """Else the turns of the prompt would be lost."""
    prompt = _messages(("user", "p"), ("assistant", "o"), ("user", "q"))
    last = {"chosen": _messages(("user", "q"), ("assistant", "a")), "rejected": _messages(("user", "q"), ("assistant", "b"))}
    with pytest.raises(ValueError, match="chosen: it is a whole dialogue, but does not begin with the messages of the prompt"):
        parse_pair({"prompt": prompt} | last)
    whole = {name: prompt[:-1] + turns for name, turns in last.items()}
    assert parse_pair({"prompt": prompt} | whole) == parse_pair(whole)
    # A system message may be in one of the two only, and white space around a text does not count.
    kind = _messages(("system", "Be kind."))
    systems = {name: kind + turns for name, turns in whole.items()}
    assert parse_pair({"prompt": prompt} | systems) == parse_pair({"prompt": kind + prompt} | whole) == parse_pair(systems)
    assert parse_pair({"prompt": [prompt[0] | {"content": "p "}, *prompt[1:]]} | whole) == parse_pair(whole)


def test_a_call_of_a_tool_is_refused_and_not_left_out():
    call = {"role": "assistant", "content": "I look it up.", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    with pytest.raises(ValueError, match="message 2 has tool_calls"):
        parse_dialogue([{"role": "user", "content": "q"}, call])
    assert parse_dialogue([{"role": "user", "content": "q"}, call | {"tool_calls": None}])[1] == assistant("I look it up.")


def test_an_answer_after_a_prompt_can_begin_with_the_name_of_a_speaker():
    row = {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " Human: a", "rejected": " b"}
    assert parse_pair(row)[0] == (user("q"), assistant("Human: a"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "Human: q\n\nAssistant: a"}, "the key 'rejected' is missing"),
        ({"chosen": "Human: q", "rejected": "Human: q\n\nAssistant: a"}, "chosen: the dialogue does not end with"),
        ({"chosen": [], "rejected": []}, "chosen: the dialogue does not end with"),
        ({"chosen": "Human: q\n\nAssistant: a", "rejected": 7}, "rejected: type int; a transcript"),
    ],
)
def test_an_invalid_pair_is_refused_and_the_key_is_named(row, message):
    with pytest.raises(ValueError, match=message):
        parse_pair(row)


def test_the_front_is_cut_at_a_user_turn():
    context = (user("one"), assistant("two"), assistant("three"), user("four"), assistant("five"), user("six"))

    def at_most(count):
        return lambda messages: len(messages) <= count

    assert cut_front(context, at_most(6)) == context
    assert cut_front(context, at_most(5)) == context[3:]  # never starts with the assistant
    assert cut_front(context, at_most(2)) == context[5:]
    assert cut_front(context, at_most(0)) is None


def test_a_long_dialogue_is_cut_without_counting_all_of_its_parts():
    """Counting each of the 1,000 suffixes would take a time that grows with the square of the length."""
    context, counted = tuple(message for i in range(1000) for message in (user(f"q{i}"), assistant("a"))) + (user("q"),), []

    def fits(part):
        counted.append(len(part))
        return len(part) <= 5

    assert cut_front(context, fits) == context[-5:]
    assert sum(counted) <= len(context) + 1 + 3 + 5 + 7
