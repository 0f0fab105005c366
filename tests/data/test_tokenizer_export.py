"""tokenizer.json of this project's own tokenizers gives the same ids in `transformers` as in SentencePiece."""

from __future__ import annotations

import random
import string

import pytest

from jaxalign.data.chat.formats import MARKERS
from jaxalign.data.tokenizers.export import tokenizer_files
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.data.world import make_world

pytestmark = pytest.mark.parity

_TEXTS = [
    "the cat sat", " the cat ", "a  dog   ran", "x\ny", "\n\nx\t y", "", "   ", "It's \"quoted\" (19 + 7 = 26).",
    "<user", "12345", "\u00fc unknown \u4e2d\u6587 letters \u4e2d", "\ufb01ne \u00bd cup", "a\u00a0b", "aaaaaaaaaaa",
    "The END", "don't stop\r\nnow",
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    world = make_world(0, 24, 4)
    lines = [part for document in world.documents("train", 20_000) for part in document if part not in MARKERS]
    tokenizer = train_tokenizer(lines, 400, folder / "tokenizer.model")
    for name, text in tokenizer_files(folder / "tokenizer.model").items():
        (folder / name).write_text(text, encoding="utf-8")
    return tokenizer, transformers.AutoTokenizer.from_pretrained(folder), lines


def test_ids_of_any_text_are_equal(both):
    ours, theirs, lines = both
    letters = random.Random(0)
    fuzz = ["".join(letters.choices(string.printable + "  aeiou", k=60)) for _ in range(300)]
    words = [" ".join(letters.choices(" ".join(lines).split(), k=12)) for _ in range(300)]
    for text in (*_TEXTS, *fuzz, *words, *lines[:300]):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text


def test_special_tokens_are_equal(both):
    ours, theirs, _ = both
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert theirs.convert_tokens_to_ids(list(MARKERS)) == [ours.marker_id(marker) for marker in MARKERS]
    assert len(theirs) == ours.vocab_size
    assert theirs.encode("the cat") == [ours.bos_id, *ours.encode("the cat")]


def test_the_ids_of_a_dialogue_written_as_text_equal_those_of_its_segments(both):
    ours, theirs, _ = both
    segments = ["<user>", "what is it?", "<assistant>", "I do not know."]
    assert theirs.encode("".join(segments), add_special_tokens=False) == ours.encode_segments(segments)


def test_encoded_text_decodes_to_itself(both):
    ours, theirs, _ = both
    ids = ours.encode("The cat sat, 19 + 7.")
    assert theirs.decode(ids) == ours.decode(ids) == "The cat sat, 19 + 7."
