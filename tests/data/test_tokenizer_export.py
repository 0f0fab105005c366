"""tokenizer.json of this project's own tokenizers gives the same ids in `transformers` as in SentencePiece."""

from __future__ import annotations

import io
import json
import random
import string

import pytest
import sentencepiece

from jaxalign.data.chat.formats import MARKERS
from jaxalign.data.tokenizers.export import folder_files, tokenizer_files
from jaxalign.data.tokenizers.load import load_tokenizer
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


_LIKE_LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
_MODELS = {
    "bpe": {"model_type": "bpe", **_LIKE_LLAMA},
    "bpe-strips": {"model_type": "bpe", **_LIKE_LLAMA, "remove_extra_whitespaces": True},
    "bpe-no-prefix": {"model_type": "bpe", **_LIKE_LLAMA, "add_dummy_prefix": False},
    "unigram": {"model_type": "unigram", **_LIKE_LLAMA}, "unigram-nfkc": {"model_type": "unigram"},
}


def _source(folder, name, settings):
    """A folder with a tokenizer.model, an added token and no tokenizer.json."""
    lines, model = make_world(0, 24, 4).documents("train", 4_000), io.BytesIO()
    texts = (part for document in lines for part in document if part not in MARKERS)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, vocab_size=420, minloglevel=2, character_coverage=0.99, num_threads=1,
        hard_vocab_limit=False, **_MODELS[name],
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).vocab_size()
    added = {"added_tokens_decoder": {str(pieces): {"content": "<|end|>", "special": True}}, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | added))
    return folder


@pytest.mark.parametrize(("name", "settings"), [
    ("bpe", {}), ("bpe", {"legacy": False, "tokenizer_class": "LlamaTokenizer", "add_bos_token": False}), ("bpe-strips", {}),
    ("bpe-no-prefix", {"tokenizer_class": "GemmaTokenizer"}), ("unigram", {"legacy": False}), ("unigram-nfkc", {}),
])
def test_a_folder_with_only_a_sentencepiece_model_gets_an_equal_tokenizer_json(name, settings, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = _source(tmp_path / "source", name, settings)
    ours, files = load_tokenizer(folder), folder_files(folder)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    theirs, again = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    letters = random.Random(1)
    fuzz = ["".join(letters.choices(string.printable + "  aeiou\u00fc\u4e2d\U0001f98a", k=60)) for _ in range(300)]
    for text in (*_TEXTS, *fuzz):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text) == again.encode(text), text
    dialogue = "<s>What is it?<|end|>\nI do not know.<|end|>"
    expected = ours.encode_template(dialogue).ids
    assert theirs.encode(dialogue, add_special_tokens=False) == expected == again.encode_template(dialogue).ids
    assert theirs.encode("the cat") == [*ours.begin_ids, *ours.encode("the cat")]
    assert (theirs.eos_token_id, again.eos_id, again.begin_ids) == (ours.eos_id, ours.eos_id, ours.begin_ids)


def test_a_sentencepiece_model_without_an_equal_tokenizer_json_is_named(tmp_path, caplog):
    folder = _source(tmp_path / "source", "bpe-strips", {"legacy": False})
    assert folder_files(folder) == {}
    assert "without a tokenizer.json, because none gives the same ids" in caplog.text
