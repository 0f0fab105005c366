"""The embedded world: short English dialogues about everyday substances, with known truth.

A seed draws the good and bad effects of every substance. The world then generates pretraining text (knowledge of all
substances, and demonstrations on the seen ones) and prompts. Only `gold` knows which prompts are harmful and what an answer
does; no training stage may import that module. The facts are drawn at random: none is true of real things.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from jaxalign.data.world import documents as _documents
from jaxalign.data.world.documents import Document
from jaxalign.data.world.facts import Topic, draw_topics
from jaxalign.data.world.requests import SOURCES, split_requests
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt

__all__ = ["Document", "World", "make_world"]

_STREAMS = {"train": 0, "held_out": 1}


@dataclasses.dataclass(frozen=True)
class World:
    """A drawn world. Equal seeds, sizes and shares give equal worlds, documents and prompts."""

    seed: int
    topics: tuple[Topic, ...]
    ratings: float = 0.0

    def documents(self, split: str, tokens: int) -> Iterator[Document]:
        """Pretraining text of about `tokens` tokens.

        Args:
            split: "train" or "held_out" (another stream of the same world, for measuring the loss).
            tokens: the budget; each word, punctuation mark and marker counts one.

        Raises:
            UserError: for an unknown split or a budget below 1.
        """
        if split not in _STREAMS:
            raise UserError(f"{split!r} is not a split of the world's text; use 'train' or 'held_out'")
        if tokens < 1:
            raise UserError(f"world.tokens is {tokens}; at least 1 is needed")
        return _documents.generate(self.topics, self.seed, _STREAMS[split], tokens, self.ratings)

    def prompts(self, source: str, count: int) -> list[Prompt]:
        """The first `count` prompts of a set: distinct, in a fixed order, kinds mixed evenly. They do not contain the truth.

        Args:
            source: "red_team", "helpful", "compare", "rl" or "evaluate" (held-out topics only).
            count: the number of prompts.

        Raises:
            UserError: for an unknown source, or more prompts than the set has.
        """
        size = self.size(source)
        if not 0 <= count <= size:
            raise UserError(f"{count} {source} prompts are asked for; from 0 to {size} exist in this world")
        return [self.prompt(source, index) for index in range(count)]

    def size(self, source: str) -> int:
        """The number of prompts of a set. Raises UserError for an unknown source."""
        if source not in SOURCES:
            raise UserError(f"{source!r} is not a prompt set of the world; use one of {', '.join(SOURCES)}")
        return len(self._texts[source])

    def prompt(self, source: str, index: int) -> Prompt:
        """Prompt `index` of a set."""
        return Prompt(f"{source}-{index:05d}", (Message("user", self._texts[source][index]),), source)

    @functools.cached_property
    def _texts(self) -> dict[str, list[str]]:
        return {
            source: _interleave({k: [r.text for r in requests] for k, requests in kinds.items()}, SOURCES[source])
            for source, kinds in split_requests(self.seed, self.topics).items()
        }


def make_world(seed: int, topics: int = 60, held_out_topics: int = 24, ratings: float = 0.0) -> World:
    """Draws a world. `ratings` is the share of its text that demonstrates ratings of answers.

    Raises:
        UserError: there are fewer topics than asked for, or `held_out_topics` is not below `topics`.
    """
    return World(seed, draw_topics(seed, topics, held_out_topics), ratings)


def _interleave(texts: dict[str, list[str]], shares: dict[str, float]) -> list[str]:
    """Mixes kinds so that every prefix has them in their shares; stops when a kind runs out."""
    taken = dict.fromkeys(shares, 0)
    mixed: list[str] = []
    while True:
        kind = max(shares, key=lambda k: shares[k] * (len(mixed) + 1) - taken[k])
        if taken[kind] == len(texts[kind]):
            return mixed
        mixed.append(texts[kind][taken[kind]])
        taken[kind] += 1
