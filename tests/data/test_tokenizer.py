import os
from pathlib import Path

import pytest

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat import formats
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message
from tests import made_tokenizers

TEXTS = ["the cat sat on the mat.", "the dog sat on the log.", "a cat and a dog sat."] * 20
SIZE = 140


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(TEXTS, SIZE, tmp_path_factory.mktemp("tokenizer") / "new" / "t.model")


def test_size_and_special_ids(tokenizer):
    assert tokenizer.vocab_size == SIZE
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    markers = [tokenizer.marker_id(marker) for marker in formats.MARKERS]
    assert len(set(markers)) == len(formats.MARKERS)
    assert not {0, 1, 2, 3}.intersection(markers)


def test_encoded_text_decodes_to_itself(tokenizer):
    text = "the cat sat on a dog. Zebra, (A) <user>!"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_marker_is_one_id_and_only_as_a_whole_segment(tokenizer):
    ids = tokenizer.encode_segments(["<user>", "the cat", "<assistant>", "<end>"])
    assert ids[0] == tokenizer.marker_id("<user>")
    assert ids[-2:] == [tokenizer.marker_id("<assistant>"), tokenizer.eos_id]
    posed = tokenizer.encode_segments(["say <assistant> and <end> now"])
    assert tokenizer.marker_id("<assistant>") not in posed
    assert tokenizer.eos_id not in posed


def test_boundaries_of_documents_and_prompts_agree(tokenizer):
    ask, answer = Message("user", "the cat sat."), "a dog sat."
    prompt = tokenizer.encode_segments(formats.render_prompt([ask]))
    response = tokenizer.encode_segments(formats.render_response(answer))
    whole = tokenizer.encode_segments(formats.render_dialogue([ask, Message("assistant", answer)]))
    assert whole == prompt + response
    assert tokenizer.decode(response) == answer


def test_decoding_leaves_out_special_tokens(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("the cat"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "the cat"


def test_training_twice_gives_the_same_file(tmp_path):
    train_tokenizer(TEXTS, SIZE, tmp_path / "a.model")
    train_tokenizer(TEXTS, SIZE, tmp_path / "b.model")
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "b.model"]


def test_mistakes_are_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.model does not exist"):
        load_tokenizer(tmp_path / "nowhere.model")
    (tmp_path / "bad.model").write_bytes(b"\x0a\xff\xff not a model")
    with pytest.raises(UserError, match=r"bad\.model is not a readable SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(UserError, match="cannot train a tokenizer of 100000 symbols"):
        train_tokenizer(TEXTS, 100_000, tmp_path / "big.model")
    with pytest.raises(UserError, match="no symbol '<bogus>'"):
        tokenizer.marker_id("<bogus>")


def _real(name: str) -> Path:
    root = Path(os.environ.get("JAXALIGN_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = root / name
    if not path.is_file():
        pytest.skip(f"real data not found: {name}")
    return path


def test_a_llama_tokenizer_reads_hh_transcripts_without_stray_spaces():
    llama = load_tokenizer(_real("stories260K/hf/tokenizer.model"))
    assert (llama.vocab_size, llama.bos_id, llama.eos_id) == (512, 1, 2)
    turns = [Message("user", "Tell me."), Message("assistant", "Once."), Message("user", "And?")]
    segments = formats.render_prompt(turns, style="hh")
    # Segments after the first lose and gain no text: their ids decode to the joined text.
    assert llama.decode(llama.encode_segments(segments)) == "".join(segments)


def test_a_tokenizer_with_other_special_ids():
    pegasus = load_tokenizer(_real("tokenizers/pegasus_sp_test.model"))
    assert (pegasus.pad_id, pegasus.eos_id) == (0, 1)
    assert len({pegasus.pad_id, pegasus.eos_id, pegasus.bos_id}) == 3


MIXED = "Hello  world, \uff21\n\tNew line.  "
"""Two spaces, a full-width letter, a line break with a tab, spaces at the end."""


@pytest.mark.parametrize(("name", "expected"), [
    ("tinystories_tok4096", "Hello world, \uff21\n\tNew line."),  # Runs of spaces become one; nothing else changes.
    ("pegasus_sp_test", "Hello world, A New line."),  # NFKC, and line breaks and tabs become spaces.
    ("test_model", "Hello world, A \u2047 New line."),  # NFKC; it does not know line breaks and tabs, and has no byte fallback.
])
def test_real_tokenizers_decode_to_the_normalised_text(name, expected):
    tokenizer = load_tokenizer(_real(f"tokenizers/{name}.model"))
    assert tokenizer.decode(tokenizer.encode(MIXED)) == expected
    plain = expected.replace(" \u2047", "")
    assert tokenizer.decode(tokenizer.encode(plain)) == plain
    text = "Once upon a time, there was a little girl. She said: \"It isn't (really) so!\""
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not tokenizer.special_ids & set(tokenizer.encode("<s> </s> <pad> <0x41>"))


@pytest.mark.parametrize("name", ["tinystories_tok4096", "pegasus_sp_test"])
def test_models_with_byte_fallback_lose_no_character(name):
    tokenizer, text = load_tokenizer(_real(f"tokenizers/{name}.model")), "é 漢字 😀 \u05d0\u05b8 x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parity
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("name", ["stories260K/hf/tokenizer.model", "tokenizers/tinystories_tok4096.model"])
def test_a_chat_through_a_sentencepiece_model_equals_that_of_transformers(name, legacy, tmp_path):
    """With and without the space that legacy tokenizers put after special tokens."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(_real(name).read_bytes())
    made_tokenizers.write_settings(tmp_path, made_tokenizers.MISTRAL.replace("'[INST] '", "'[INST]'"), bos_token="<s>",
                                   eos_token="</s>", unk_token="<unk>", tokenizer_class="LlamaTokenizer", legacy=legacy)
    said = ["Why did it sit?", "It is 4.", "é 漢字 😀 ok", "the mat.\nThen"]
    messages = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(said)]
    given = [{"role": message.role, "content": message.content} for message in messages]
    expected = transformers.LlamaTokenizer.from_pretrained(tmp_path).apply_chat_template(given, return_dict=False)
    assert chat.encode_dialogue(load_tokenizer(tmp_path), messages)[0] == expected


@pytest.mark.parametrize("name", ["tinystories_tok4096", "pegasus_sp_test", "test_model"])
def test_in_a_chat_through_a_real_tokenizer_only_assistant_turns_are_trained(name, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(_real(f"tokenizers/{name}.model").read_bytes())
    made_tokenizers.write_settings(tmp_path, made_tokenizers.MISTRAL, bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(tmp_path)
    said = ["Why did </s> it sit?", "It was tired.", "And then?", "It slept."]
    ids, mask = chat.encode_dialogue(tokenizer, [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(said)])
    assert ids.count(tokenizer.eos_id) == 2 and ids[0] == tokenizer.bos_id
    learnt = [token for token, counts in zip(ids, mask, strict=True) if counts]
    ends = [i for i, token in enumerate(learnt) if token == tokenizer.eos_id]
    assert tokenizer.decode(learnt[: ends[0]]) == said[1] and tokenizer.decode(learnt[ends[0] + 1 :]) == said[3]
