"""The pretraining text: facts about every topic, and demonstrations only on the seen topics.

A document is a tuple of segments (see `jaxalign.data.chat.formats`), without the final eos. `demonstrations` draws the content
of a demonstration; this module writes it in the project's markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from jaxalign import streams
from jaxalign.data.chat import formats
from jaxalign.data.chat.requests import load_set
from jaxalign.data.world import demonstrations, vocabulary
from jaxalign.data.world.answers import alternative_text, pick
from jaxalign.data.world.facts import Relation, Topic, fact_text, use_text
from jaxalign.records import Message

Document = tuple[str, ...]

MIX = {"knowledge": 0.38, "dialogue": 0.12, "review": 0.22, "judgement": 0.28}
"""Fraction of the pretraining tokens by kind of document."""

REASONED = 0.85
"""Default fraction of judgements and ratings that begin with reasoning."""

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
    mix = MIX if not ratings else {kind: share * (1 - ratings) for kind, share in MIX.items()} | {"rating": ratings}
    written = dict.fromkeys(mix, 0)  # Tokens by kind.
    while (total := sum(written.values())) < tokens:
        lacking = {kind: share * (total + 1) - written[kind] for kind, share in mix.items()}
        kind = max(lacking, key=lacking.get)
        document = knowledge(rng, topics) if kind == "knowledge" else _demonstration(rng, kind, seen, reasoned)
        length = count_tokens(document)
        if length <= LONGEST:
            written[kind] += length
            yield document


def knowledge(rng: np.random.Generator, topics: tuple[Topic, ...]) -> Document:
    """Facts about several topics as running text, in most documents shuffled, otherwise topic by topic."""
    chosen = [topics[i] for i in rng.permutation(len(topics))[:3]]
    sentences = []
    for topic in chosen:
        sentences += [_fact_sentence(rng, topic, topic.relations[i]) for i in rng.permutation(len(topic.relations))]
        use = f"{use_text(topic)}."
        sentences.append(f"{pick(rng, _USE_QUESTIONS).format(topic=topic.name)} {use}" if rng.random() < 0.6 else use)
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


def _demonstration(rng: np.random.Generator, kind: str, seen: tuple[Topic, ...], reasoned: float) -> Document:
    """A demonstration in the template set "world", as the policy or the judge reads the request."""
    if kind == "dialogue":
        drawn = demonstrations.draw_dialogue(rng, seen)
        return tuple(formats.render_dialogue([*drawn.messages, Message("assistant", drawn.written)]))
    if kind == "review":
        drawn, template = demonstrations.draw_review(rng, seen), "revision"
        written = drawn.written
    elif kind == "judgement":
        drawn, template = demonstrations.draw_judgement(rng, seen, reasoned), "comparison"
        written = formats.TIE if drawn.option is None else formats.OPTIONS[drawn.option]
    else:
        drawn, template = demonstrations.draw_rating(rng, seen, reasoned), "rating"
        written = formats.RATINGS[drawn.option]
    request = load_set("world").render(template, drawn.messages, drawn.principle, **drawn.shown)
    return (*formats.render_request(*request, "compact"), written)
