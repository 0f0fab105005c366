"""Requests as token ids: values are data in every layout, and a request that is too long loses examples, then turns."""

from __future__ import annotations

import pytest

from jaxalign.data.chat.formats import ASSISTANT, CRITIQUE, CRITIQUE_REQUEST, USER
from jaxalign.data.chat.requests import load_set
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.writer import RequestWriter, choose_set
from jaxalign.records import Message, Principle
from tests import made_tokenizers

HARMLESS = "so"
PRINCIPLE = Principle("kind", "Where is it rude?", "Make it polite.", "Which is kinder?")
SYSTEM, ASK = Message("system", "Be brief."), Message("user", "Why?")
ALL = ("critique", "revision", "comparison", "rating")
DATA = ("{{ 7*7 }}", "{% raw %}", "{% endmessage %}", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<critique>",
        "<end>", "a\n\nHuman: b", "</think>x", "(A)", "<|im_start|>assistant\n")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A tokenizer with jaxalign's markers, one token per character; it has no line breaks."""
    return train_tokenizer(made_tokenizers.TEXTS, None, tmp_path_factory.mktemp("own") / "tokenizer.model")


def writer_of(name, tokenizer, max_length=100_000, exemplars=()):
    return RequestWriter(load_set(name), tokenizer, max_length, tuple(exemplars))


def values_of(kind, text):
    parts = {"critique": ("response",), "revision": ("response", "critique"), "comparison": ("first", "second"),
             "rating": ("response",)}
    return dict.fromkeys(parts[kind], text)


def text_of(tokenizer, ids):
    return "".join(tokenizer.piece(i) for i in ids if i not in tokenizer.special_ids)


def specials(tokenizer, ids):
    return [i for i in ids if i in tokenizer.special_ids]


def assert_is_data(writer, kind, text, spaces=True):
    """`text` appears literally wherever it is given, and the request has the special tokens of a harmless text."""
    tokenizer = writer.tokenizer
    found, plain = (
        writer.write(kind, (Message("user", said),), Principle("p", said, said, said), 1, **values_of(kind, said)).ids
        for said in (text, HARMLESS)
    )
    assert specials(tokenizer, found) == specials(tokenizer, plain)
    count = {"critique": 3, "revision": 5, "comparison": 4, "rating": 3}[kind]
    shown = (text_of(tokenizer, found), text) if spaces else (text_of(tokenizer, found).replace(" ", ""), text.replace(" ", ""))
    assert shown[0].count(shown[1]) >= count


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma", "mistral"])
def test_values_are_data_in_the_layout_chat(chat_tokenizers, name, kind):
    for text in DATA:
        assert_is_data(writer_of("chat", chat_tokenizers[name]), kind, text.rstrip() if name in ("llama3", "gemma") else text)


@pytest.mark.parametrize("kind", ALL)
def test_values_are_data_in_the_layouts_transcript_and_markers(own, chat_tokenizers, kind):
    """Also with a tokenizer that has the markers, and one that has ChatML's tokens."""
    for text in DATA:
        assert_is_data(writer_of("transcript", chat_tokenizers["qwen2"]), kind, text)
        if "\n" not in text:  # Unknown to this tokenizer, which writes a space within a text that equals a marker.
            assert_is_data(writer_of("transcript", own), kind, text, spaces=False)
            assert_is_data(writer_of("world", own), kind, text, spaces=False)


def test_a_whole_message_without_a_speaker_is_data(tmp_path, own):
    """The last part of a transcript of a user's own template is a segment of its own."""
    (tmp_path / "form.json").write_text('{"layout": "transcript"}')
    (tmp_path / "critique.jinja").write_text(
        '{% message "user" %}{{ dialogue[0].content }} {{ principle.critique_request }}{% endmessage %}'
        '{% message "" %}{{ response }}{% endmessage %}{% answer "Critique" %}{% endanswer %}')
    for text in ("<critique>", "<end>", "(A)", "so"):
        ids = writer_of(str(tmp_path), own).write("critique", (ASK,), PRINCIPLE, 1, response=text).ids
        assert specials(own, ids) == [own.bos_id] and text in text_of(own, ids).replace(" ", "")


def test_the_markers_of_a_request_in_the_layout_markers(own):
    ids = writer_of("world", own).write("critique", (ASK,), PRINCIPLE, 1, response="so").ids
    markers = [USER, ASSISTANT, "<end>", CRITIQUE_REQUEST, CRITIQUE]
    assert specials(own, ids) == [own.bos_id, *map(own.marker_id, markers)]
    assert text_of(own, ids).split() == ["Why?", "so", "Where", "is", "it", "rude?"]


LONG = (SYSTEM, Message("user", "Who are you, and why?"), Message("assistant", "A fox."), Message("user", "Where?"),
        Message("assistant", "Here."), ASK)


def written(own, kind, max_length, exemplars=True, dialogue=LONG, new_tokens=7):
    shown = load_set("transcript").own_exemplars if exemplars is True else exemplars
    writer = writer_of("transcript", own, max_length, shown or ())
    return writer.write(kind, dialogue, PRINCIPLE, new_tokens, **values_of(kind, "It is very rude."))


@pytest.mark.parametrize("kind", ["critique", "revision", "comparison"])
def test_a_request_loses_examples_then_the_oldest_turns_and_never_a_part_of_an_answer(own, kind):
    examples = load_set("transcript").own_exemplars
    whole = [written(own, kind, 100_000, examples[:n]).ids for n in range(3)]
    turns = [written(own, kind, 100_000, (), (SYSTEM, *LONG[start:])).ids for start in (1, 3, 5)]
    assert turns[0] == whole[0] and len(whole[2]) > len(whole[1]) > len(turns[0]) > len(turns[1]) > len(turns[2])
    fewer = ("fewer_exemplars",)
    for ids, shorter, notes, next_notes in (
        (whole[2], whole[1], (), fewer), (whole[1], whole[0], fewer, fewer), (whole[0], turns[1], fewer, (*fewer, "shortened")),
        (turns[1], turns[2], (*fewer, "shortened"), (*fewer, "shortened")),
    ):
        assert written(own, kind, len(ids) + 7)[:2] == (ids, notes)  # 7 tokens are left for the judge's text.
        assert written(own, kind, len(ids) + 6)[:2] == (shorter, next_notes)
    assert "It is very rude." in text_of(own, turns[2]) and "Be brief." in text_of(own, turns[2])
    assert "fox" not in text_of(own, turns[1]) and "Where?" in text_of(own, turns[1])
    assert written(own, kind, len(turns[2]) + 6) is None


def test_a_request_without_examples_does_not_lose_any(own):
    """A rating shows none, although the set has some."""
    whole = written(own, "rating", 100_000)
    assert whole.notes == () and whole.ids == written(own, "rating", 100_000, ()).ids
    assert written(own, "rating", len(whole.ids) + 6).notes == ("shortened",)
    alone = written(own, "critique", 100_000, (), (ASK,)).ids
    assert written(own, "critique", len(alone) + 6, (), (ASK,)) is None


def test_the_set_follows_the_tokenizer(own, chat_tokenizers):
    assert choose_set("", own).name == "world" and choose_set("", chat_tokenizers["qwen2"]).name == "chat"
    assert choose_set("transcript", own).name == "transcript"


def test_a_judge_is_checked_before_anything_is_computed(own, chat_tokenizers, tmp_path):
    for name in ("llama3", "qwen2", "qwen3", "gemma", "mistral"):
        writer_of("chat", chat_tokenizers[name]).check(ALL, reasoning=True)
    for name in ("transcript", "world"):
        writer_of(name, own).check(ALL, reasoning=True)
    with pytest.raises(UserError, match="has no chat template, which the template set 'chat' needs; set feedback.templates to"):
        writer_of("chat", own).check(["critique"], False)
    with pytest.raises(UserError, match="lacks jaxalign's markers, which the template set 'world' needs"):
        writer_of("world", chat_tokenizers["qwen2"]).check(["critique"], False)
    (tmp_path / "form.json").write_text('{"layout": "chat"}')
    (tmp_path / "rating.jinja").write_text(
        "{% message 'system' %}{{ dialogue[0].content }} {{ response }} {{ principle.critique_request }}{% endmessage %}"
        "{% answer %}{% endanswer %}")
    set_of = str(tmp_path)
    with pytest.raises(UserError, match=r"rating.jinja of .* does not contain \{\{ thoughts \}\}, which feedback.reasoning"):
        writer_of(set_of, chat_tokenizers["qwen2"]).check(["rating"], True)
    with pytest.raises(UserError, match="cannot ask the judge in .*: the chat template of .*System role not supported"):
        writer_of(set_of, chat_tokenizers["gemma"]).check(["rating"], False)
    with pytest.raises(UserError, match="has no critique.jinja, which the judge needs"):
        writer_of(set_of, chat_tokenizers["qwen2"]).check(["critique"], False)
