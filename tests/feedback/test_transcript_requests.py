"""The requests of the template set "transcript", character by character, with three real tokenizers."""

from __future__ import annotations

import json
import re

import pytest

from jaxalign.data.chat.formats import render_request
from jaxalign.data.chat.requests import load_set
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.feedback.constitution import load_exemplars
from jaxalign.feedback.writer import RequestWriter
from jaxalign.records import Message, Principle

PRINCIPLE = Principle("kind", "Where is it rude?", "Make it polite.", "Which is kinder?")
DIALOGUE = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "Why?"))
TURNS = "\n\nBe brief.\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?"
SHOWN = f"\n\nHuman: Consider the following conversation between a human and an assistant:{TURNS}\n\n"
COMPARE = SHOWN + "Which is kinder?\nOptions:\n(A) It is 4.\n(B) Go away!"
RATE = SHOWN + "The assistant's answer: Go away!\n\nWhere is it rude?\nRate the answer from 1 (worst) to 10 (best)."
CRITICISE = TURNS + "\n\nAssistant: Go away!\n\nCritiqueRequest: Where is it rude?\n\nCritique:"
PAIR, ANSWER = {"first": "It is 4.", "second": "Go away!"}, {"response": "Go away!"}
AFTER = {"reasoning": True, "thoughts": "A helps."}
STEPS = "\n\nAssistant: Let's think step by step:"
REQUESTS = {
    "critique": ("critique", ANSWER, CRITICISE),
    "revision": ("revision", ANSWER | {"critique": "All of it."},
                 CRITICISE + " All of it.\n\nRevisionRequest: Make it polite.\n\nRevision:"),
    "comparison": ("comparison", PAIR, COMPARE + "\n\nAssistant: The answer is: ("),
    "reasoning": ("comparison", PAIR | {"reasoning": True}, COMPARE + STEPS),
    "verdict": ("comparison", PAIR | AFTER, COMPARE + STEPS + " A helps.\n\nThe answer is: ("),
    "rating": ("rating", ANSWER, RATE + "\n\nAssistant: The rating is:"),
    "rating_reasoning": ("rating", ANSWER | {"reasoning": True}, RATE + STEPS),
    "rating_verdict": ("rating", ANSWER | AFTER, RATE + STEPS + " A helps.\n\nThe rating is:"),
}


def unigram_without_line_breaks(text):
    """Pegasus: each run of whitespace is one space."""
    return " ".join(text.split())


def without_unknown(text):
    """The model of 1000 pieces: line breaks and five digits are unknown (U+2047); whitespace next to them is not compared."""
    return " ".join(re.sub("[\u204734679]", " ", text).split())


def exact(text):
    """Byte fallback: every character is kept, except for spaces at both ends."""
    return text.strip(" ")


TOKENIZERS = {"pegasus_sp_test": unigram_without_line_breaks, "test_model": without_unknown, "tinystories_tok4096": exact}


@pytest.fixture(scope="module")
def tokenizers(real_data):
    return {name: load_tokenizer(real_data / "tokenizers" / f"{name}.model") for name in TOKENIZERS}


@pytest.fixture(scope="module")
def public(real_data):
    """The file of the public constitution with 16 principles and 4 examples."""
    return real_data / "constitutions" / "constitution_anthropic.json"


def written(tokenizer, kind, exemplars=(), dialogue=DIALOGUE, **values):
    writer = RequestWriter(load_set("transcript"), tokenizer, 100_000, tuple(exemplars))
    return writer.write(kind, dialogue, PRINCIPLE, 1, **values)


def assert_reads(tokenizer, name, ids, text):
    assert tuple(ids[: len(tokenizer.begin_ids)]) == tokenizer.begin_ids
    own = ids[len(tokenizer.begin_ids) :]
    assert tokenizer.special_ids.isdisjoint(own)
    assert TOKENIZERS[name](tokenizer.decode(own)) == TOKENIZERS[name](text)


@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_request_is_a_transcript(request_name):
    kind, values, text = REQUESTS[request_name]
    request = load_set("transcript").render(kind, DIALOGUE, PRINCIPLE, **values)
    assert "".join(render_request(*request, "hh")) == text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_the_ids_of_a_request_are_its_text(tokenizers, name, request_name):
    kind, values, text = REQUESTS[request_name]
    assert_reads(tokenizers[name], name, written(tokenizers[name], kind, **values).ids, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_examples_of_the_public_constitution_precede_a_critique(tokenizers, public, name):
    tokenizer = tokenizers[name]
    chats = [[turn["content"] for turn in chat] for chat in json.loads(public.read_text("utf-8"))["system_chat"]]
    examples = "".join(
        f"\n\nHuman: {question}\n\nAssistant: {answer}\n\nCritiqueRequest: {asked}\n\nCritique: {critique}\n\n"
        f"RevisionRequest: {wanted}\n\nRevision: {revision}\n\n---"
        for question, answer, asked, critique, wanted, revision in chats
    )
    request = written(tokenizer, "critique", load_exemplars(public), **ANSWER)
    assert len(chats) == 4 and request.notes == ()
    assert_reads(tokenizer, name, request.ids, examples + CRITICISE)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("reasoning", [False, True])
def test_the_examples_of_a_comparison_show_the_better_answer_in_both_places(tokenizers, public, name, reasoning):
    tokenizer = tokenizers[name]
    one, two = load_exemplars(public)[:2]
    thought = [f"Let's think step by step: {example.critique}\n\n" if reasoning else "" for example in (one, two)]
    begin = "Human: Consider the following conversation between a human and an assistant:\n\nHuman:"
    asked = "Which answer is better under this request?"
    examples = (
        f"\n\n{begin} {one.dialogue[0].content}\n\n{asked} {one.critique_request}\nOptions:\n(A) {one.response}\n"
        f"(B) {one.revision}\n\nAssistant: {thought[0]}The answer is: (B)\n\n---"
        f"\n\n{begin} {two.dialogue[0].content}\n\n{asked} {two.critique_request}\nOptions:\n(A) {two.revision}\n"
        f"(B) {two.response}\n\nAssistant: {thought[1]}The answer is: (A)\n\n---"
    )
    request = written(tokenizer, "comparison", (one, two), **PAIR, **({"reasoning": True} if reasoning else {}))
    end = STEPS if reasoning else "\n\nAssistant: The answer is: ("
    assert_reads(tokenizer, name, request.ids, examples + COMPARE + end)


def test_the_set_has_examples_of_its_own_in_the_public_format():
    """For a constitution without any; each revision differs from its answer."""
    examples = load_set("transcript").own_exemplars
    assert len(examples) == 2 and all(example.response != example.revision for example in examples)
