"""A word tokenizer and a scripted speaker, for tests of the feedback package."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxalign.data.chat.formats import END, MARKERS
from jaxalign.errors import UserError
from jaxalign.feedback.speaker import Utterance
from jaxalign.records import Message, Principle, Prompt
from tests import tiny

PRINCIPLES = tuple(
    Principle(f"rule-{i}", f"critique {i}", f"revise {i}", f"Which is better by {i}?") for i in range(5)
)


class WordTokenizer:
    """Ids of `tiny.DECODER`: 1 begins, 2 ends, ids from 3 are the markers, and 18 to 31 are words, hashed by their letters."""

    vocab_size, bos_id, eos_id, pad_id = tiny.DECODER.vocab, 1, 2, 2
    begin_ids, stop_ids = (1,), (2,)

    def marker_id(self, marker):
        if marker not in MARKERS:
            raise UserError(f"the tokenizer has no symbol {marker!r}")
        return 3 + MARKERS.index(marker)

    def encode(self, text):
        return [18 + sum(map(ord, word)) % 14 for word in text.split()]

    def encode_segments(self, segments):
        ids = []
        for segment in segments:
            if segment == END:
                ids.append(self.eos_id)
            elif segment in MARKERS:
                ids.append(self.marker_id(segment))
            else:
                ids += self.encode(segment)
        return ids

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)


@dataclasses.dataclass
class ScriptedSpeaker:
    """Answers with `script(segments, call)`: a text, or None for a truncated answer. Records its requests."""

    script: Any
    calls: list = dataclasses.field(default_factory=list)
    tokenizer: Any = dataclasses.field(default_factory=WordTokenizer)

    def say(self, prompts, key, sampling, numbers):
        assert len(numbers) == len(prompts)
        self.calls.append((list(prompts), key, sampling, list(numbers)))
        out = []
        for segments in prompts:
            text = self.script(segments, len(self.calls) - 1)
            ended = text is not None
            out.append(Utterance(text or "cut", (5, 2) if ended else (5,), ended, -1.0))
        return out


def prompt(number: int, text: str = "how so") -> Prompt:
    return Prompt(f"test-{number:03d}", (Message("user", f"{text} {number}"),), "red_team")
