"""tokenizer.json gives the ids of `transformers`, and ordinary text never becomes a special token."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers

from jaxalign.data.chat import formats
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message
from tests import made_tokenizers

KINDS = ("qwen", "llama3", "unigram", "llama2")
TEXT = "the cat sat.\n\nWhy é 漢字 😀?\tIt is  4."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: getattr(made_tokenizers, kind)(root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def loaded(folders):
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


def theirs(folder):
    return pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_special_ids_equal_those_of_transformers(folders, loaded, kind):
    ours, other = loaded[kind], theirs(folders[kind])
    assert ours.encode(TEXT) == other(TEXT, add_special_tokens=False).input_ids
    assert [*ours.begin_ids, *ours.encode(TEXT)] == other(TEXT).input_ids
    assert (ours.bos_id, ours.eos_id) == (other.bos_token_id, other.eos_token_id)
    assert ours.pad_id == (other.eos_token_id if other.pad_token_id is None else other.pad_token_id)
    assert ours.vocab_size == 1 + max(other.get_vocab().values())


@pytest.mark.parametrize("kind", ["qwen", "llama3", "llama2"])
def test_encoded_text_decodes_to_itself(loaded, kind):
    tokenizer, rng = loaded[kind], random.Random(0)
    alphabet = "ab cC\n\t.é漢😀<|>/[]_"
    texts = [TEXT, *("x" + "".join(rng.choices(alphabet, k=30)) + "x" for _ in range(200))]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts


def test_a_unigram_model_decodes_text_of_known_characters_to_itself(loaded):
    text = "the cat sat on the mat. Why did it sit there?"
    assert loaded["unigram"].decode(loaded["unigram"].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_spelled_out_in_text_are_text(loaded, kind):
    tokenizer = loaded[kind]
    # Each special token, and two tokens joined from parts of one.
    names = [tokenizer.piece(token) for token in tokenizer.special_ids]
    for name in (*names, *(name[:3] + name + name[3:] for name in names)):
        for text in (name, f"a{name}b {name}", f"\n{name}"):
            ids = tokenizer.encode_segments([text])
            assert not tokenizer.special_ids & {*ids, *tokenizer.encode(text)}, text
            assert name in tokenizer.decode(tokenizer.encode(text)), text


@pytest.mark.parity
def test_plain_added_tokens_match_in_text_as_in_transformers(folders, loaded):
    text = "a<think>b</think>"
    assert loaded["qwen"].encode(text) == theirs(folders["qwen"])(text, add_special_tokens=False).input_ids
    assert len(loaded["qwen"].encode(text)) == 4 and loaded["qwen"].decode(loaded["qwen"].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_and_padded_ids_have_no_text(loaded, kind):
    tokenizer = loaded[kind]
    ids = [*tokenizer.begin_ids, *tokenizer.encode("the cat"), tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size + 3]
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.piece(tokenizer.vocab_size + 3) == f"[{tokenizer.vocab_size + 3}]"


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_transcript_gain_and_lose_no_space(loaded, kind):
    turns = [Message("user", "the cat"), Message("assistant", "sat."), Message("user", "Why?")]
    segments = formats.render_prompt(turns, style="hh")
    assert loaded[kind].decode(loaded[kind].encode_segments(segments)) == "".join(segments)


def test_padding_and_truncation_in_the_file_do_not_affect_encoding(folders, tmp_path):
    whole = json.loads((folders["qwen"] / "tokenizer.json").read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    whole["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 330,
                        "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    made_tokenizers.write_settings(tmp_path, eos_token="<|im_end|>")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXT) == load_tokenizer(folders["qwen"]).encode(TEXT) and tokenizer.begin_ids == ()


def test_a_token_that_only_the_folder_marks_as_special_is_special(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folders["qwen"] / "tokenizer.json").read_bytes())
    made_tokenizers.write_settings(tmp_path, eos_token="<|im_end|>", additional_special_tokens=["<think>"])
    tokenizer = load_tokenizer(tmp_path)
    think = tokenizer.encode_template("<think>").ids
    assert len(think) == 1 and think[0] in tokenizer.special_ids and think[0] not in tokenizer.encode("a<think>")


def test_an_end_token_that_only_the_model_config_names_is_special(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folders["qwen"] / "tokenizer.json").read_bytes())
    made_tokenizers.write_settings(tmp_path, eos_token="<|im_end|>")
    think = load_tokenizer(tmp_path).encode("<think>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [332, *think]}))
    tokenizer = load_tokenizer(tmp_path)
    assert len(think) == 1 and think[0] in tokenizer.special_ids and think[0] not in tokenizer.encode("a<think>")


@pytest.mark.parity
def test_special_tokens_include_the_white_space_that_they_strip(folders, tmp_path):
    """Phi-3's end of a turn also consumes the line break after it."""
    library = tokenizers.Tokenizer.from_file(str(folders["qwen"] / "tokenizer.json"))
    library.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True, normalized=False)])
    library.add_tokens([tokenizers.AddedToken("<|turn|>", rstrip=True, normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    made_tokenizers.write_settings(tmp_path, eos_token="<|end|>", additional_special_tokens=["<|turn|>"])
    tokenizer, text = load_tokenizer(tmp_path), "a<|end|>\n<|turn|>\nb"
    assert tokenizer.encode_template(text).ids == theirs(tmp_path)(text, add_special_tokens=False).input_ids
    assert len(tokenizer.encode_template(text).ids) == 4


def test_a_damaged_file_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a readable tokenizer.json .*download or copy it again"):
        load_tokenizer(tmp_path)
