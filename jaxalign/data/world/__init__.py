"""The embedded world: short English dialogues about everyday substances, with known ground truth.

The seed determines the good and bad effects of every substance. The world then generates pretraining text (facts about all
substances, and demonstrations on the seen ones) and prompts. Only the module `gold` judges prompts and answers; no training
stage may import it. The facts are drawn at random and are not meant to be true of real things.
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

__all__ = ["Document", "EmbeddedWorld", "make_world"]

_STREAMS = {"train": 0, "held_out": 1}


@dataclasses.dataclass(frozen=True)
class EmbeddedWorld:
    """A world drawn from a seed. Equal fields give equal documents and prompts.

    ratings: the fraction of the text that demonstrates ratings. reasoned: the fraction of judgements and ratings that begin
    with reasoning.
    """

    seed: int
    topics: tuple[Topic, ...]
    ratings: float = 0.0
    reasoned: float = _documents.REASONED

    def documents(self, split: str, tokens: int) -> Iterator[Document]:
        """Pretraining text of about `tokens` tokens.

        Args:
            split: "train" or "held_out" (a different text from the same world, for measuring the loss).
            tokens: the approximate size; each word, punctuation mark and marker counts as one token.

        Raises:
            UserError: the split is unknown, or `tokens` is below 1.
        """
        if split not in _STREAMS:
            raise UserError(f"{split!r} is not a split of the world's text; use 'train' or 'held_out'")
        if tokens < 1:
            raise UserError(f"world.tokens is {tokens}; at least 1 is needed")
        return _documents.generate(self.topics, self.seed, _STREAMS[split], tokens, self.ratings, self.reasoned)

    def prompts(self, source: str, count: int | None = None) -> list[Prompt]:
        """The first `count` prompts of a set: distinct, in a fixed order, with evenly mixed kinds, and without their truth.

        Args:
            source: "red_team", "helpful", "compare", "rl" or "evaluate" (only held-out topics).
            count: the number of prompts; None: all of the set.

        Raises:
            UserError: the source is unknown, or the set has fewer prompts.
        """
        if source not in SOURCES:
            raise UserError(f"{source!r} is not a prompt set of the world; use one of {', '.join(SOURCES)}")
        texts = self._texts[source]
        if count is not None and not 0 <= count <= len(texts):
            raise UserError(f"{count} {source} prompts are requested; this world has {len(texts)}")
        return [Prompt(f"{source}-{i:05d}", (Message("user", text),), source) for i, text in enumerate(texts[:count])]

    @functools.cached_property
    def _texts(self) -> dict[str, list[str]]:
        """The texts of each set: every prefix contains the kinds in proportion to their shares, until a kind runs out."""
        texts: dict[str, list[str]] = {}
        for source, requests in split_requests(self.seed, self.topics).items():
            shares, mixed = SOURCES[source], []
            taken = dict.fromkeys(shares, 0)
            while True:
                kind = max(shares, key=lambda k: shares[k] * (len(mixed) + 1) - taken[k])  # noqa: B023
                if taken[kind] == len(requests[kind]):
                    break
                mixed.append(requests[kind][taken[kind]].text)
                taken[kind] += 1
            texts[source] = mixed
        return texts


def make_world(
    seed: int, topics: int = 60, held_out_topics: int = 24, ratings: float = 0.0, reasoned: float = _documents.REASONED
) -> EmbeddedWorld:
    """Draws a world. ratings, reasoned: see `EmbeddedWorld`.

    Raises:
        UserError: `topics` exceeds the available topics, or `held_out_topics` is not below `topics`.
    """
    return EmbeddedWorld(seed, draw_topics(seed, topics, held_out_topics), ratings, reasoned)
