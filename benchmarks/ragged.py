"""Ragged text for the training benchmarks: real files, or generated documents with similar lengths.

Both sides get the same token ids: jaxalign through the stages' own encoding, a peer through a JSON file of ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import at_least

from jaxalign.data.chat.styles import encode_answer, encode_prompt
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt

STYLE = "hh"
MEDIAN, SPREAD = 30, 0.8
"""Maximum number of generated tokens per text; lengths are log-normal."""


class Words:
    """A tokenizer for generated text: numbers are ids, everything else is dropped."""

    begin_ids, eos_id = (1,), 2

    def __init__(self, vocab: int):
        self.vocab_size = vocab

    def encode_segments(self, segments: Sequence[str]) -> list[int]:
        return [int(word) for segment in segments for word in segment.split() if word.isdigit()]


class Texts(NamedTuple):
    """Pairs of answers with their encoding; the results report `source`."""

    tokenizer: object
    pairs: list[Comparison]
    source: str

    def prompt_ids(self, pair: Comparison) -> list[int]:
        return encode_prompt(self.tokenizer, pair.prompt.messages, STYLE)

    def answer_ids(self, text: str) -> list[int]:
        return encode_answer(self.tokenizer, text, STYLE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="a .json file of instructions, or a .jsonl(.gz) file of chosen and rejected "
                        "answers; default: generated texts")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer file, or a folder with one, for --data")
    parser.add_argument("--documents", type=at_least(1), default=2000, help="number of documents to read or generate")


def read(options: argparse.Namespace, max_length: int) -> Texts:
    """Read or generate the texts; the vocabulary of `options` grows to the tokenizer's.

    For instructions both answers of the pair are the same. Dialogues longer than max_length are cut at a turn.
    """
    if options.data is None:
        texts = Texts(Words(options.vocab), _made_up(options), "made up")
    else:
        if options.tokenizer is None:
            raise UserError("--data needs --tokenizer, a tokenizer file or a folder with one")
        tokenizer = load_tokenizer(options.tokenizer)
        texts = Texts(tokenizer, [], options.data.name)
        texts.pairs.extend(_read_pairs(options, texts, max_length))
        options.vocab = max(options.vocab, tokenizer.vocab_size)
    return texts


def _read_pairs(options: argparse.Namespace, texts: Texts, max_length: int) -> list[Comparison]:
    if options.data.suffix == ".json":
        rows = json.loads(options.data.read_text(encoding="utf-8"))[: options.documents]
        asked = ["\n\n".join(part for part in (row["instruction"], row.get("input")) if part) for row in rows]
        return [_pair(i, text, row["output"], row["output"]) for i, (text, row) in enumerate(zip(asked, rows, strict=True))]

    def count(messages, answer: str) -> int:
        return len(encode_prompt(texts.tokenizer, messages, STYLE)) + len(texts.answer_ids(answer))

    return read_preferences(options.data, limit=options.documents, count_tokens=count, max_tokens=max_length)[0]


def _made_up(options: argparse.Namespace) -> list[Comparison]:
    rng = np.random.default_rng(options.seed)

    def text() -> str:
        length = max(1, int(rng.lognormal(np.log(MEDIAN), SPREAD)))
        return " ".join(map(str, rng.integers(4, options.vocab, length)))

    return [_pair(i, text(), text(), text()) for i in range(options.documents)]


def _pair(number: int, asked: str, first: str, second: str) -> Comparison:
    return Comparison(Prompt(str(number), (Message("user", asked),), "benchmark"), first, second, 1.0)


def write_ids(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    """Write token ids for a peer, one JSON object per row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
