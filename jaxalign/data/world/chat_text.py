"""The text of a chat model of the world: facts as plain text, and the demonstrations as dialogues of the template set "chat".

A judge that reads requests of this set reads the messages that these documents contain (`jaxalign.data.chat.requests`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxalign import streams
from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.requests import TemplateSet, load_set
from jaxalign.data.tokenizers.base import Tokenizer
from jaxalign.data.world import World, demonstrations, documents, make_world
from jaxalign.records import Message

TOPICS, HELD_OUT_TOPICS = 60, 20
MIX = {"knowledge": 0.2, "dialogue": 0.1, "review": 0.27, "judgement": 0.37, "rating": 0.06}
"""Fraction of the words by kind of document."""
REASONED = 0.85
"""Fraction of judgements and ratings that begin with reasoning."""
LONGEST = 340
"""The maximum number of words and punctuation marks in a document, so that rows of `ROW_LENGTH` tokens truncate none."""
ROW_LENGTH = 400

_STREAMS = {"train": 0, "held_out": 1}
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclasses.dataclass(frozen=True)
class ChatDocument:
    """A dialogue, or plain text without turns.

    Attributes:
        messages: the turns; a text has one, whose role is "".
        learned: the indices of the turns that the model learns to write.
    """

    messages: tuple[Message, ...]
    learned: tuple[int, ...]

    @property
    def words(self) -> int:
        """The number of words and punctuation marks."""
        return sum(len(_WORD.findall(message.content)) for message in self.messages)


def chat_world(seed: int) -> World:
    """The world of an exported chat model."""
    return make_world(seed, TOPICS, HELD_OUT_TOPICS)


def generate(world: World, split: str, tokens: int) -> Iterator[ChatDocument]:
    """Documents of all kinds in random order, about `tokens` tokens in total.

    Facts are about all topics, demonstrations only about the seen ones. Each kind gets its share in `MIX`.

    Args:
        world: the world.
        split: "train" or "held_out" (a different text, for measuring the loss).
        tokens: the approximate size; each word and punctuation mark counts as one token.
    """
    rng = np.random.default_rng([world.seed, streams.DATA["chat documents"], _STREAMS[split]])
    seen = tuple(topic for topic in world.topics if not topic.held_out)
    templates = load_set("chat")
    made = dict.fromkeys(MIX, 0)
    while (total := sum(made.values())) < tokens:
        lacking = {kind: share * (total + 1) - made[kind] for kind, share in MIX.items()}
        kind = max(lacking, key=lacking.get)
        if kind == "knowledge":
            document = ChatDocument((Message("", documents.knowledge(rng, world.topics)[0]),), (0,))
        else:
            document = _MAKERS[kind](rng, seen, templates)
        if document.words <= LONGEST:
            made[kind] += document.words
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
        ids = [*prompt, *tokenizer.encode_continuation(document.messages[turn].content), tokenizer.eos_id]
        spans.append((len(prompt), len(ids)))
    weights = np.zeros(len(ids))
    for start, stop in spans:
        weights[start:stop] = 1.0
    return ids, weights.tolist()


def _dialogue(rng: np.random.Generator, seen: tuple, templates: TemplateSet) -> ChatDocument:
    drawn = demonstrations.draw_dialogue(rng, seen)
    return ChatDocument((*drawn.messages, Message("assistant", drawn.answer)), (len(drawn.messages),))


def _review(rng: np.random.Generator, seen: tuple, templates: TemplateSet) -> ChatDocument:
    """A critique and a revision. The response that they are about is not learned, because it often has a fault."""
    drawn = demonstrations.draw_review(rng, seen)
    shown = {"response": drawn.response, "critique": drawn.critique}
    request = templates.render("revision", drawn.messages, drawn.principle, **shown)
    critique = len(templates.render("critique", drawn.messages, drawn.principle, response=drawn.response).messages)
    return ChatDocument((*request.messages, Message("assistant", drawn.revision)), (critique, len(request.messages)))


def _judgement(rng: np.random.Generator, seen: tuple, templates: TemplateSet) -> ChatDocument:
    drawn = demonstrations.draw_judgement(rng, seen, REASONED, summary=True)
    option = templates.form["tie"] if drawn.choice is None else templates.form["options"][drawn.choice]
    shown = {"first": drawn.first, "second": drawn.second, "ties": True}
    return _judged(templates, "comparison", drawn, shown, option)


def _rating(rng: np.random.Generator, seen: tuple, templates: TemplateSet) -> ChatDocument:
    drawn = demonstrations.draw_rating(rng, seen, REASONED)
    option = templates.form["ratings"][drawn.rating - 1]
    return _judged(templates, "rating", drawn, {"response": drawn.response}, option)


def _judged(templates: TemplateSet, kind: str, drawn: Any, shown: Mapping[str, Any], option: str) -> ChatDocument:
    """A request, and the option after the reasoning, if any, as the template begins the answer."""
    if drawn.thoughts is not None:
        shown = {**shown, "reasoning": True, "thoughts": drawn.thoughts}
    messages, _, begin = templates.render(kind, drawn.messages, drawn.principle, **shown)
    answer = f"{begin} {option}" if begin else option
    return ChatDocument((*messages, Message("assistant", answer)), (len(messages),))


_MAKERS = {"dialogue": _dialogue, "review": _review, "judgement": _judgement, "rating": _rating}
