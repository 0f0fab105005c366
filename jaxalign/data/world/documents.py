"""The pretraining text: facts about every topic, and demonstrations only on the seen topics.

A document is a tuple of segments (see `jaxalign.data.chat.formats`), without the final eos. The rates below define how often
demonstrated answers have a fault, and how often demonstrated reviews and judgements are wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxalign import streams
from jaxalign.data.chat import formats
from jaxalign.data.chat.requests import load_set
from jaxalign.data.world import judging, principles, reviews, vocabulary
from jaxalign.data.world.answers import Answer, alternative_text, draw_answer, pick
from jaxalign.data.world.facts import Relation, Topic, fact_text, use_text
from jaxalign.data.world.requests import requests_about
from jaxalign.records import Message, Principle

Document = tuple[str, ...]

MIX = {"knowledge": 0.38, "dialogue": 0.12, "review": 0.22, "judgement": 0.28}
"""Fraction of the pretraining tokens by kind of document."""

RUDE_RATE = 0.35
RAMBLE_RATE = 0.3
REFUSAL_RATE = 0.1
"""Fraction of refusals among the demonstrated answers to harmful requests."""
EVASION_SHARE = 0.6
"""Fraction of evasions among the demonstrated refusals."""
WRONG_REFUSAL_RATE = 0.01
NOISE_RATE = 0.02
"""Fraction of wrong reviews (the answer is not revised), judgements (the other option) and ratings."""
REASONED = 0.85
"""Default fraction of judgements and ratings that begin with reasoning."""
TIE_RATE = 0.15
"""Fraction of demonstrated judgements with answers that are equal on the axis. Random answers would be equal in about half."""
AXIS_SHARES = {"harm": 0.46, "refusal": 0.2, "courtesy": 0.17, "focus": 0.17}

LONGEST = 250
"""The maximum number of tokens in a document, so that packed rows of 256 truncate none."""

_WORD = re.compile(r"\w+|[^\w\s]")


def count_tokens(document: Document) -> int:
    """The approximate number of tokens of a document: words, punctuation marks, markers, and its eos."""
    return 1 + sum(1 if s in formats.MARKERS or s == formats.END else len(_WORD.findall(s)) for s in document)


def generate(
    topics: tuple[Topic, ...], seed: int, stream: int, tokens: int, ratings: float = 0.0, reasoned: float = REASONED
) -> Iterator[Document]:
    """Documents of all kinds in random order, about `tokens` tokens in total.

    Each kind gets its share of the tokens, whatever the length of its documents. `ratings` is the fraction of demonstrated
    ratings; the other kinds share the rest in the proportions of `MIX`. `reasoned` is the fraction of judgements and ratings
    that begin with reasoning.
    """
    rng = np.random.default_rng([seed, streams.DATA["documents"], stream])
    seen = tuple(topic for topic in topics if not topic.held_out)
    judgement, rating = (functools.partial(make, reasoned=reasoned) for make in (_judgement, _rating))
    makers = {"knowledge": _knowledge, "dialogue": _dialogue, "review": _review, "judgement": judgement, "rating": rating}
    mix = MIX if not ratings else {kind: share * (1 - ratings) for kind, share in MIX.items()} | {"rating": ratings}
    made = dict.fromkeys(mix, 0)
    while (total := sum(made.values())) < tokens:
        lacking = {kind: share * (total + 1) - made[kind] for kind, share in mix.items()}
        kind = max(lacking, key=lacking.get)
        document = makers[kind](rng, topics if kind == "knowledge" else seen)
        if count_tokens(document) > LONGEST:
            continue
        made[kind] += count_tokens(document)
        yield document


def _knowledge(rng: np.random.Generator, topics: tuple[Topic, ...]) -> Document:
    """Facts about several topics as running text, in most documents shuffled, otherwise topic by topic."""
    chosen = [topics[i] for i in rng.permutation(len(topics))[:3]]
    sentences = [sentence for topic in chosen for sentence in _topic_sentences(rng, topic)]
    if rng.random() < 0.7:
        sentences = [sentences[i] for i in rng.permutation(len(sentences))]
    while count_tokens(tuple(sentences)) > LONGEST:
        sentences.pop()
    return (" ".join(sentences),)


_USE_QUESTIONS = ("How is {topic} used?", "What is done with {topic}?", "And {topic}?")
_EFFECT_QUESTIONS = (
    "What does {topic} do on {owner} {target}?",
    "What if {owner} {target} get {topic}?",
    "Is {topic} good for {owner} {target}?",
    "Would you give {owner} {target} {topic}?",
    "And {topic} on {target}?",
)


def _topic_sentences(rng: np.random.Generator, topic: Topic) -> list[str]:
    sentences = [_fact_sentence(rng, topic, topic.relations[i]) for i in rng.permutation(len(topic.relations))]
    use = f"{use_text(topic)}."
    sentences.append(f"{pick(rng, _USE_QUESTIONS).format(topic=topic.name)} {use}" if rng.random() < 0.6 else use)
    return sentences


def _fact_sentence(rng: np.random.Generator, topic: Topic, relation: Relation) -> str:
    draw = rng.random()
    fact, owner = fact_text(relation), pick(rng, vocabulary.OWNERS)
    if not relation.good and rng.random() < 0.35:
        fact = f"{fact} {alternative_text(rng, topic)}"
    if draw < 0.3:
        return fact
    if draw < 0.9:
        return f"{pick(rng, _EFFECT_QUESTIONS).format(topic=relation.topic, target=relation.target, owner=owner)} {fact}"
    verdict = "good" if relation.good else "bad"
    return f"It is {verdict} to put {relation.topic} on {relation.target}: it {relation.effect} them."


def _draw_request(rng: np.random.Generator, seen: tuple[Topic, ...]) -> tuple[Topic, Relation, tuple[Message, ...]]:
    topic = pick(rng, seen)
    relation = pick(rng, topic.relations)
    requests = requests_about(relation)
    kind = pick(rng, sorted({request.kind for request in requests}))
    text = pick(rng, [request.text for request in requests if request.kind == kind])
    return topic, relation, (Message("user", text),)


def _dialogue(rng: np.random.Generator, seen: tuple[Topic, ...]) -> Document:
    topic, relation, messages = _draw_request(rng, seen)
    stance = "help"
    if rng.random() < (WRONG_REFUSAL_RATE if relation.good else REFUSAL_RATE):
        stance = "evade" if rng.random() < EVASION_SHARE else "refuse"
    answer = draw_answer(rng, topic, relation, stance, RUDE_RATE, RAMBLE_RATE)
    return tuple(formats.render_dialogue([*messages, Message("assistant", answer.text)]))


def _stance(rng: np.random.Generator, relation: Relation) -> str:
    shares = (0.75, 0.9) if relation.good else (0.5, 0.75)
    draw = rng.random()
    return "help" if draw < shares[0] else "refuse" if draw < shares[1] else "evade"


def _draw_axis(rng: np.random.Generator) -> str:
    return str(rng.choice(list(AXIS_SHARES), p=list(AXIS_SHARES.values())))


def _review(rng: np.random.Generator, seen: tuple[Topic, ...]) -> Document:
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    answer = draw_answer(rng, topic, relation, _stance(rng, relation), RUDE_RATE, RAMBLE_RATE)
    critique, revised = reviews.review(rng, axis, topic, relation, answer)
    if rng.random() < NOISE_RATE:
        revised = answer
    return (*_request("revision", messages, principle, response=answer.text, critique=critique), revised.text)


def _judgement(rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float) -> Document:
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    tie = rng.random() < TIE_RATE
    while True:
        first, second = (_draw_contender(rng, axis, topic, relation) for _ in range(2))
        choice = judging.better(axis, relation, first, second)
        if (choice is None) == tie:
            break
    if choice is not None and rng.random() < NOISE_RATE:
        choice = 1 - choice
    option = formats.TIE if choice is None else formats.OPTIONS[choice]
    shown = {"first": first.text, "second": second.text}
    if rng.random() < reasoned:
        shown |= {"reasoning": True, "thoughts": judging.reasoning_text(axis, relation, first, second, choice)}
    return (*_request("comparison", messages, principle, **shown), option)


def _rating(rng: np.random.Generator, seen: tuple[Topic, ...], reasoned: float) -> Document:
    """A critique that ends with a rating: high if the answer is good on the axis, low if it is not."""
    topic, relation, messages = _draw_request(rng, seen)
    axis = _draw_axis(rng)
    principle = pick(rng, principles.PRINCIPLES[axis])
    answer = _draw_contender(rng, axis, topic, relation)
    good = judging.merit(axis, relation, answer) == 1
    if rng.random() < NOISE_RATE:
        good = not good
    rating = formats.RATINGS[int(rng.integers(7, 10) if good else rng.integers(0, 3))]
    thoughts = {}
    if rng.random() < reasoned:
        thoughts = {"reasoning": True, "thoughts": reviews.review(rng, axis, topic, relation, answer)[0]}
    return (*_request("rating", messages, principle, response=answer.text, **thoughts), rating)


def _request(kind: str, messages: tuple[Message, ...], principle: Principle, **values: Any) -> list[str]:
    """The segments of a request in the template set "world", as the judge reads it."""
    return formats.render_request(*load_set("world").render(kind, messages, principle, **values), "compact")


def _draw_contender(rng: np.random.Generator, axis: str, topic: Topic, relation: Relation) -> Answer:
    """An answer with balanced stances on the axes that depend on the stance."""
    stance = _stance(rng, relation)
    if axis == "harm":
        stance = pick(rng, ("help", "help", "refuse", "evade"))
    elif axis == "refusal":
        stance = pick(rng, ("help", "refuse", "evade", "evade"))
    return draw_answer(rng, topic, relation, stance, 0.45, 0.45)
