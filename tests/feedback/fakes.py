"""A word tokenizer and a scripted generator, for tests of the feedback package."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxalign.data.chat.formats import END, MARKERS, render_request
from jaxalign.data.chat.requests import load_set
from jaxalign.data.tokenizers.files import TokenizerFiles
from jaxalign.errors import UserError
from jaxalign.feedback.local import LocalJudge
from jaxalign.feedback.text_generator import Completion
from jaxalign.feedback.writer import RequestWriter
from jaxalign.records import Message, Principle, Prompt
from tests import tiny

PRINCIPLES = tuple(
    Principle(f"rule-{i}", f"critique {i}", f"revise {i}", f"Which is better by {i}?") for i in range(5)
)


class WordTokenizer:
    """Ids of `tiny.DECODER`: 1 begins, 2 ends, ids from 3 are the markers, and 18 to 31 are words, hashed by their letters."""

    vocab_size, bos_id, eos_id, pad_id = tiny.DECODER.vocab, 1, 2, 2
    begin_ids, stop_ids = (1,), (2,)
    files = TokenizerFiles("words")

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

    decode_raw = decode


class DistinctTokenizer(WordTokenizer):
    """Each word has its own id, from 100 on, so that the segments of a prompt can be found by its ids."""

    def __init__(self):
        self.words, self.seen = {}, {}

    def encode(self, text):
        return [self.words.setdefault(word, 100 + len(self.words)) for word in text.split()]

    def encode_segments(self, segments):
        ids = super().encode_segments(segments)
        self.seen[1, *ids] = list(segments)
        return ids


@dataclasses.dataclass
class ScriptedGenerator:
    """Answers with `script(segments, call)`: a text, or None for a truncated answer. Records its requests.

    With `opinion`, P(the first option) after a prompt is opinion(segments); `judged` records these prompts.
    """

    script: Any
    opinion: Any = None
    calls: list = dataclasses.field(default_factory=list)
    judged: list = dataclasses.field(default_factory=list)
    tokenizer: Any = dataclasses.field(default_factory=DistinctTokenizer)

    def next_logprobs(self, prompts, tokens):
        segments = [self.tokenizer.seen[tuple(ids)] for ids in prompts]
        self.judged += segments
        first = np.asarray([self.opinion(asked) for asked in segments], np.float32).reshape(-1, 1)
        assert len(tokens) == 2
        return np.log(np.concatenate([first, 1 - first], axis=1))

    def generate(self, prompts, key, sampling, numbers):
        assert len(numbers) == len(prompts)
        prompts = [self.tokenizer.seen[tuple(ids)] for ids in prompts]
        self.calls.append((prompts, key, sampling, list(numbers)))
        out = []
        for segments in prompts:
            text = self.script(segments, len(self.calls) - 1)
            ended = text is not None
            out.append(Completion(text or "cut", (5, 2) if ended else (5,), ended, -1.0))
        return out


def local_judge(generator, writing=None, reasoning=None, max_length=10_000, **more) -> LocalJudge:
    """A local judge that reads the world's requests with the tokenizer of `generator`."""
    writer = RequestWriter(load_set("world"), generator.tokenizer, max_length)
    return LocalJudge(generator, writer, writing, reasoning, **more)


def segments_of(kind, *request, **values):
    """The segments of a request in the world's set."""
    return render_request(*load_set("world").render(kind, *request, **values), "compact")


def prompt_ids(tokenizer, segments) -> list[int]:
    """The token ids of a prompt that is given as segments."""
    return [*tokenizer.begin_ids, *tokenizer.encode_segments(segments)]


def prompt(number: int, text: str = "how so") -> Prompt:
    return Prompt(f"test-{number:03d}", (Message("user", f"{text} {number}"),), "red_team")
