"""The chat model's text: requests as a local judge reads them, loss only on the text that the model writes, and the rates."""

from __future__ import annotations

import itertools
import re

import pytest

from jaxalign.data.chat.requests import load_set
from jaxalign.data.tokenizers import chatml
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.world import chat_text, gold
from jaxalign.feedback.writer import RequestWriter
from jaxalign.records import Message, Principle, Prompt

START = "<|im_start|>"


@pytest.fixture(scope="module")
def world():
    return chat_text.chat_world(3)


@pytest.fixture(scope="module")
def documents(world):
    return list(chat_text.generate(world, "train", 120_000))


@pytest.fixture(scope="module")
def judge_documents(world):
    return list(chat_text.generate(world, "train", 120_000, "judge"))


@pytest.fixture(scope="module")
def tokenizer(documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, text in chatml.train_files((turn.content for d in documents for turn in d.messages), 900).items():
        (folder / name).write_text(text)
    return load_tokenizer(folder)


def learned_text(tokenizer, document):
    ids, weights = chat_text.encode(tokenizer, document)
    assert set(weights) <= {0.0, 1.0}
    runs = itertools.groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for weight, run in runs if weight]


def of_kind(documents, start):
    return [d for d in documents if d.messages[0].content.startswith(start) and d.messages[0].role == "user"]


def test_requests_equal_those_of_a_judge_token_for_token(tokenizer, documents):
    """The template set's variables are read back from the text of the document."""
    writer = RequestWriter(load_set("chat"), tokenizer, 10_000, ties=True)
    comparison = next(d for d in of_kind(documents, "Here is a conversation between a user and an assistant, followed by two")
                      if "Better answer" in d.messages[1].content)
    text, answer = comparison.messages[0].content, comparison.messages[1].content
    question = text.split("[Question]\n")[1].split("\n\n")[0]
    values = {"first": text.split("[Answer A]\n")[1].split("\n\n")[0], "second": text.split("[Answer B]\n")[1].split("\n\n")[0],
              "reasoning": True}
    dialogue = (Message("user", text.split("User: ")[1].split("\n\n")[0]),)
    thoughts, verdict = answer.split("\n\nBetter answer:")
    principle = Principle("p", "Why?", "Mend it.", question)
    ids, weights = chat_text.encode(tokenizer, comparison)
    asked = writer.write("comparison", dialogue, principle, 1, **values).ids
    assert ids[: len(asked)] == asked and sum(weights) == len(ids) - len(asked)
    decided = writer.write("comparison", dialogue, principle, 1, thoughts=thoughts, **values).ids
    letter = {name: spellings for name, spellings in zip("ABC", writer.options("comparison").ids, strict=True)}[verdict.strip()]
    assert ids[: len(decided)] == decided and tuple(ids[len(decided) : -1]) in letter and ids[-1] == tokenizer.eos_id


def test_critiques_and_revisions_equal_the_judges_requests_token_for_token(tokenizer, documents):
    writer = RequestWriter(load_set("chat"), tokenizer, 10_000)
    for document in [d for d in documents if len(d.messages) == 6][:5]:
        question, response, request, critique, edit, _ = (turn.content for turn in document.messages)
        principle = Principle("p", request.split("\n\n")[0], edit.split("\n\n")[0], "Which?")
        ids, weights = chat_text.encode(tokenizer, document)
        for kind, values in {"critique": {}, "revision": {"critique": critique}}.items():
            asked = writer.write(kind, (Message("user", question),), principle, 1, response=response, **values).ids
            assert ids[: len(asked)] == asked
            assert weights[len(asked)] == 1.0 and weights[len(asked) - 1] == 0.0


def test_only_the_text_that_the_model_writes_is_learned(tokenizer, documents):
    for document in documents[:80]:
        assert learned_text(tokenizer, document) == [document.messages[turn].content for turn in document.learned]


@pytest.mark.parametrize("reader", ("model", "judge"))
def test_demonstrations_are_about_seen_topics_and_facts_about_all(world, reader, request):
    documents = request.getfixturevalue("documents" if reader == "model" else "judge_documents")
    held_out = [topic.name for topic in world.topics if topic.held_out]
    facts = " ".join(d.messages[0].content for d in documents if not d.messages[0].role)
    shown = " ".join(turn.content for d in documents if d.messages[0].role for turn in d.messages)
    assert all(f" {name} " in facts for name in held_out)
    assert not [name for name in held_out if f" {name} " in shown]


def test_equal_answers_get_the_letter_of_a_tie(documents):
    answers = [d.messages[1].content for d in of_kind(documents, "Here is a conversation")]
    ends = {ending: {answer[-1] for answer in answers if f"{ending}\n" in answer}
            for ending in ("The first is better.", "The second is better.", "Neither is better.")}
    assert ends == {"The first is better.": {"A"}, "The second is better.": {"B"}, "Neither is better.": {"C"}}


def test_the_text_is_reproducible_and_its_kinds_have_their_shares(world, documents):
    assert list(itertools.islice(chat_text.generate(world, "train", 120_000), 40)) == documents[:40]
    assert list(itertools.islice(chat_text.generate(world, "held_out", 120_000), 40)) != documents[:40]
    words = sum(d.words for d in documents)
    facts = sum(d.words for d in documents if not d.messages[0].role)
    assert facts / words == pytest.approx(chat_text.MIXES["model"]["knowledge"], abs=0.01)


@pytest.mark.medium
def test_no_document_is_longer_than_a_row(tokenizer, documents):
    assert max(len(chat_text.encode(tokenizer, d)[0]) for d in documents) <= chat_text.ROW_LENGTH


USE = r"With (\w+), (\w+) it in (\w+) and (\w+) it on the (\w+)\."


def ratings_of_details(documents):
    return [d for d in of_kind(documents, "Here is") if "every detail right?" in d.messages[0].content]


def test_the_judges_ratings_of_details_agree_with_the_gold_judge(world, judge_documents):
    seen = {True: 0, False: 0}
    for document in ratings_of_details(judge_documents):
        if document.quoted:
            continue
        text, answer = (turn.content for turn in document.messages)
        dialogue = (Message("user", text.split("User: ")[1].split("\n\n")[0]),)
        verdict = gold.judge(world, Prompt("p", dialogue, "evaluate"), text.split("[Answer]\n")[1].split("\n\n")[0])
        seen[verdict.helpful] += 1
        assert (int(answer.split()[-1]) > 5) == verdict.helpful
        if answer.startswith("The use:"):
            assert ("That is good." in answer) == verdict.helpful
            assert len(re.findall(r"(\w+) (\w+) (equal|wrong)\.", answer)) == (0 if verdict.refused else 4)
    assert min(seen.values()) > 20


def test_the_judge_learns_to_compare_random_uses_but_not_to_write_them(tokenizer, judge_documents):
    compared = [d for d in ratings_of_details(judge_documents) if d.quoted]
    right_answers = 0
    for document in compared:
        answer = document.messages[-1].content
        assert answer.startswith(document.quoted)
        (_, *right), (_, *given) = right_use, given_use = re.findall(USE, document.quoted)
        pairs = [f"{a} {b} {'equal' if a == b else 'wrong'}." for a, b in zip(right, given, strict=True)]
        good = right_use == given_use
        comparison = f" {' '.join(pairs)} That is {'good' if good else 'bad'}.\n\nRating: "
        assert answer.removeprefix(document.quoted).startswith(comparison) and (int(answer.split()[-1]) > 5) == good
        assert learned_text(tokenizer, document) == [answer.removeprefix(document.quoted).lstrip()]
        right_answers += good
    assert 0.2 < right_answers / len(compared) < 0.5


def test_the_judges_lists_compare_two_words(judge_documents):
    lists = [d.messages[0].content for d in judge_documents if re.match(r"\w+ \w+ (equal|wrong)\.", d.messages[0].content)]
    pairs = re.findall(r"(\w+) (\w+) (equal|wrong)\.", " ".join(lists))
    assert all((first == second) == (word == "equal") for first, second, word in pairs)
    assert 0.4 < sum(word == "equal" for *_, word in pairs) / len(pairs) < 0.65


def test_the_judge_reads_another_text_than_the_model(documents, judge_documents):
    facts = [[d.messages[0].content for d in text if not d.messages[0].role] for text in (documents, judge_documents)]
    assert not set(facts[0][:20]) & set(facts[1][:20])
