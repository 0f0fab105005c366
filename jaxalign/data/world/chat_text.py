"""The texts of chat models of the world: facts as plain text, and the demonstrations as dialogues of the template set "chat".

One text is for the exported model, the other for a second judge, which only rates answers.

A judge that reads requests of this set reads the messages that these documents contain (`jaxalign.data.chat.requests`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

import numpy as np

from jaxalign import streams
from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.requests import TemplateSet, load_set
from jaxalign.data.tokenizers.base import Tokenizer
from jaxalign.data.world import EmbeddedWorld, demonstrations, details, documents, make_world
from jaxalign.records import Message

TOPICS, HELD_OUT_TOPICS = 60, 20
MIXES = {
    "model": {"knowledge": 0.2, "dialogue": 0.1, "review": 0.27, "judgement": 0.37, "rating": 0.06},
    "judge": {"knowledge": 0.32, "rating": 0.16, "details": 0.25, "uses": 0.2, "pairs": 0.07},
}
"""Fraction of the words by kind of document, in the text of each model."""
REASONED = 0.85
"""Fraction of judgements and ratings that begin with reasoning."""
LONGEST = 340
"""The maximum number of words and punctuation marks in a document, so that rows of `ROW_LENGTH` tokens truncate none."""
ROW_LENGTH = 400

_STREAMS = {"model": streams.DATA["chat documents"], "judge": streams.DATA["judge documents"]}
_SPLITS = {"train": 0, "held_out": 1}
_RATINGS = {
    "rating": (demonstrations.draw_rating, REASONED),
    "details": (demonstrations.draw_detail_rating, REASONED),
    "uses": (functools.partial(demonstrations.draw_detail_rating, random=True), 1.0),
}
"""How ratings of each kind are drawn, and the fraction of them with reasoning."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class ChatDocument:
    """A dialogue, or plain text without turns.

    Attributes:
        messages: the turns; a text has one, whose role is "".
        learned: the indices of the turns that the model learns to write.
        quoted: the prefix of the last turn, which the model is shown but does not learn.
    """

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    quoted: str = ""

    @property
    def words(self) -> int:
        """The number of words and punctuation marks."""
        return sum(len(_WORD.findall(message.content)) for message in self.messages)


def chat_world(seed: int) -> EmbeddedWorld:
    """The world of an exported chat model."""
    return make_world(seed, TOPICS, HELD_OUT_TOPICS)


def generate(world: EmbeddedWorld, split: str, tokens: int, reader: str = "model") -> Iterator[ChatDocument]:
    """Documents of all kinds in random order, about `tokens` tokens in total.

    Facts are about all topics, demonstrations only about the seen ones. Each kind gets its share in `MIXES`.

    Args:
        world: the world.
        split: "train" or "held_out" (a different text, for measuring the loss).
        tokens: the approximate size; each word and punctuation mark counts as one token.
        reader: the model that learns the text, "model" or "judge".
    """
    rng = np.random.default_rng([world.seed, _STREAMS[reader], _SPLITS[split]])
    seen = tuple(topic for topic in world.topics if not topic.held_out)
    templates = load_set("chat")
    mix = MIXES[reader]
    written = dict.fromkeys(mix, 0)  # Words by kind.
    while (total := sum(written.values())) < tokens:
        lacking = {kind: share * (total + 1) - written[kind] for kind, share in mix.items()}
        kind = max(lacking, key=lacking.get)
        if kind == "knowledge":
            document = _plain(documents.knowledge(rng, world.topics)[0])
        elif kind == "pairs":
            document = _plain(details.pairs_text(rng))
        else:
            document = _demonstration(rng, kind, seen, templates)
        if document.words <= LONGEST:
            written[kind] += document.words
            yield document


def encode(tokenizer: Tokenizer, document: ChatDocument) -> tuple[list[int], list[float]]:
    """(token ids, loss weights) of a document: 1 for the text that the model learns to write and its end, 0 elsewhere.

    The ids before an answer are those of the request as a judge or a policy reads it.

    Args:
        tokenizer: a tokenizer with a chat template, whose eos ends a turn.
        document: the document.
    """
    if not document.messages[0].role:
        ids = [*tokenizer.begin_ids, *tokenizer.encode(document.messages[0].content), tokenizer.eos_id]
        return ids, [1.0] * len(ids)
    spans = []
    for turn in document.learned:
        prompt = chat.encode_prompt(tokenizer, document.messages[:turn])
        ids = [*prompt, *tokenizer.encode(document.messages[turn].content, continues=True), tokenizer.eos_id]
        spans.append((len(prompt), len(ids)))
    if document.quoted:  # The text after it begins with a space, so its ids are the same alone.
        start, stop = spans[-1]
        spans[-1] = (start + len(tokenizer.encode(document.quoted, continues=True)), stop)
    weights = np.zeros(len(ids))
    for start, stop in spans:
        weights[start:stop] = 1.0
    return ids, weights.tolist()


def _plain(text: str) -> ChatDocument:
    return ChatDocument((Message("", text),), (0,))


def _demonstration(rng: np.random.Generator, kind: str, seen: tuple, templates: TemplateSet) -> ChatDocument:
    """A demonstration as messages. The response that a review is about is not learned, because it often has a fault."""
    if kind == "dialogue":
        drawn = demonstrations.draw_dialogue(rng, seen)
        return ChatDocument((*drawn.messages, Message("assistant", drawn.written)), (len(drawn.messages),))
    if kind == "review":
        drawn = demonstrations.draw_review(rng, seen)
        request = templates.render("revision", drawn.messages, drawn.principle, **drawn.shown)
        response = drawn.shown["response"]
        critique = len(templates.render("critique", drawn.messages, drawn.principle, response=response).messages)
        messages = (*request.messages, Message("assistant", drawn.written))
        return ChatDocument(messages, (critique, len(request.messages)))
    if kind == "judgement":
        drawn = demonstrations.draw_judgement(rng, seen, REASONED, summary=True)
        option = templates.form["tie"] if drawn.option is None else templates.form["options"][drawn.option]
        request = templates.render("comparison", drawn.messages, drawn.principle, **drawn.shown, ties=True)
    else:
        draw, reasoned = _RATINGS[kind]
        drawn = draw(rng, seen, reasoned)
        option = templates.form["ratings"][drawn.option]
        request = templates.render("rating", drawn.messages, drawn.principle, **drawn.shown)
    # The option follows the reasoning, if any, as the template begins the answer.
    answer = f"{request.begin} {option}" if request.begin else option
    return ChatDocument((*request.messages, Message("assistant", answer)), (len(request.messages),), drawn.quoted)
