"""The files of a tokenizer folder, and their precedence."""

from __future__ import annotations

import json
import shutil

import pytest

from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from tests import made_tokenizers


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return made_tokenizers.qwen(tmp_path_factory.mktemp("source"))


@pytest.fixture
def folder(source, tmp_path):
    shutil.copy(source / "tokenizer.json", tmp_path)
    return tmp_path


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


END, START, TEXT_END = 332, 331, 330  # <|im_end|>, <|im_start|>, <|endoftext|>


@pytest.mark.parametrize("value", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_can_be_a_text_or_an_object_in_either_file(folder, name, value):
    write(folder, name, eos_token=value, bos_token=value)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.stop_ids) == (END, END, END, (END,))


def test_the_model_config_supplies_end_tokens_if_the_tokenizer_does_not(folder):
    write(folder, "config.json", eos_token_id=TEXT_END, bos_token_id=START)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (START, TEXT_END, (TEXT_END,))
    write(folder, "generation_config.json", eos_token_id=[END, TEXT_END])
    assert load_tokenizer(folder).stop_ids == (END, TEXT_END)


def test_further_end_tokens_of_the_model_also_stop_sampling(folder):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    write(folder, "generation_config.json", eos_token_id=[TEXT_END, END])
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (END, (END, TEXT_END))


def test_a_tokenizer_without_bos_has_none_even_if_the_model_config_has_one(folder):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>", bos_token=None)
    write(folder, "config.json", bos_token_id=TEXT_END)
    assert load_tokenizer(folder).bos_id is None


@pytest.mark.parametrize(("add", "begin"), [(None, ()), (False, ()), (True, (TEXT_END,))])
def test_bos_comes_first_only_if_the_tokenizer_adds_it(folder, add, begin):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>", bos_token="<|endoftext|>", add_bos_token=add)
    assert load_tokenizer(folder).begin_ids == begin


def test_a_disabled_bos_is_not_added(tmp_path):
    made_tokenizers.llama3(tmp_path)
    assert load_tokenizer(tmp_path).begin_ids == (2,)
    made_tokenizers.write_settings(tmp_path, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", add_bos_token=False)
    assert load_tokenizer(tmp_path).begin_ids == ()


def test_a_pad_token_outside_the_vocabulary_is_replaced_by_eos(folder):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>", pad_token="[PAD]")
    assert load_tokenizer(folder).pad_id == END


def test_a_tokenizer_without_an_end_token_is_reported_in_one_sentence(folder):
    with pytest.raises(UserError, match="has no end-of-sequence symbol"):
        load_tokenizer(folder)


def test_tokenizer_json_takes_precedence_over_tokenizer_model(folder, tmp_path_factory):
    model = made_tokenizers.sentencepiece(tmp_path_factory.mktemp("sp"))
    shutil.copy(model / "tokenizer.model", folder)
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    assert load_tokenizer(folder).vocab_size == 335
    assert load_tokenizer(folder / "tokenizer.model").vocab_size == 150
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder).vocab_size == 150


def test_added_tokens_beyond_the_file_get_their_ids(folder):
    write(folder, "tokenizer_config.json", eos_token="<|end|>",
          added_tokens_decoder={"336": {"content": "<tool>", "special": False}, "335": {"content": "<|end|>", "special": True}})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (337, 335)
    assert tokenizer.encode("<tool>") == [336] and tokenizer.encode_template("<|end|>").ids == [335]
    assert 335 not in tokenizer.encode("<|end|>")


def test_an_added_token_under_two_ids_is_reported_in_one_sentence(folder):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>", added_tokens_decoder={"7": {"content": "<|im_end|>"}})
    with pytest.raises(UserError, match="added token '<|im_end|>' the id 7 .* and 332 in tokenizer.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
    ("special_tokens_map.json", "[]", "contains a list; an object is expected"),
    ("generation_config.json", '{"eos_token_id": "\\n"}', r"give eos_token_id as '\\n'; an id or a list of ids"),
    ("tokenizer_config.json", '{"eos_token": 3}', "give eos_token as 3; a string, or an object with \"content\""),
    ("generation_config.json", '{"eos_token_id": "x"}', "give eos_token_id as 'x'; an id or a list of ids"),
    ("added_tokens.json", '{"<x>": "y"}', "the added tokens of the tokenizer in .* are malformed"),
    ("tokenizer_config.json", '{"chat_template": 3}', "neither a string nor a list of named templates"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "tools", "template": ""}]}', "named 'default', only tools"),
])
def test_invalid_settings_are_reported_in_one_sentence(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_the_sources_of_the_chat_template(folder):
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>", chat_template="one")
    assert load_tokenizer(folder).files.chat_template == "one"
    write(folder, "tokenizer_config.json", eos_token="<|im_end|>",
          chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": "two"}])
    assert load_tokenizer(folder).files.chat_template == "two"
    (folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(folder).files.chat_template == "three"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja cannot be read as text"):
        load_tokenizer(folder)


def test_an_empty_folder_and_a_missing_one_are_reported_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer: neither tokenizer.json nor tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_template_gets_the_special_tokens_of_a_folder_that_names_none(tmp_path):
    folder = made_tokenizers.sentencepiece(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).names == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_sentencepiece_folder_can_add_tokens_beyond_its_pieces(tmp_path):
    folder = made_tokenizers.sentencepiece(tmp_path)
    tokenizer, alone = load_tokenizer(folder), load_tokenizer(folder / "tokenizer.model")
    assert (tokenizer.vocab_size, alone.vocab_size) == (152, 150)
    assert tokenizer.encode("the cat sat") == alone.encode("the cat sat")
    ids = tokenizer.encode("the<tool>the <|im_end|> </s>")
    assert ids.count(151) == 1 and not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == "the<tool> the <|im_end|> </s>"  # A legacy tokenizer puts a space after an added token.
    assert tokenizer.encode_template("the<|im_end|>").ids == [*alone.encode("the"), 150]


def test_a_sentencepiece_folder_can_have_an_added_end_token(tmp_path):
    folder = made_tokenizers.sentencepiece(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", **settings | {"eos_token": "<|im_end|>", "add_bos_token": False})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.begin_ids) == (150, 0, 1, ())


def test_a_sentencepiece_folder_with_contradictory_added_tokens_is_reported_in_one_sentence(tmp_path):
    folder = made_tokenizers.sentencepiece(tmp_path)
    write(folder, "added_tokens.json", **{"<x>": 20})
    with pytest.raises(UserError, match="the id 20 to .* in tokenizer.model, and to '<x>' in its added tokens"):
        load_tokenizer(folder)


def test_a_segment_can_begin_with_an_added_line_break(tmp_path):
    folder = made_tokenizers.sentencepiece(tmp_path)
    size = load_tokenizer(folder).vocab_size
    write(folder, "added_tokens.json", **{"\n": size})
    assert load_tokenizer(folder).encode_segments(["\nthe"])[0] == size


def test_a_path_that_is_too_long_is_reported_in_one_sentence():
    with pytest.raises(UserError, match="tokenizer x{200,}.* does not exist"):
        load_tokenizer("x" * 300)
