"""`load_model`, `LanguageModel` and `jaxalign.Sampler`: loading folders, ids and texts, saving folders."""

from __future__ import annotations

import json
import re

import chex
import jax
import numpy as np
import pytest

import jaxalign as ja
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from jaxalign.records import Message, Prompt
from tests import made_tokenizers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of a random Llama in Hugging Face layout, with a ChatML template and without a template."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for kind, template in {"chat": made_tokenizers.CHATML, "text": None}.items():
        texts = made_tokenizers.qwen(root / f"{kind}_tokenizer", template)
        tokenizer = load_tokenizer(texts)
        model = Model(DecoderConfig(tokenizer.vocab_size, 2, 16, 4, 2, 4, 20))
        raw = config_json(model.config, 96) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
        export(root / kind, model, model.init(jax.random.key(0)), config=raw, source=texts)
        found[kind] = root / kind
    return found


def test_the_style_follows_from_the_folder(folders):
    assert ja.load_model(folders["chat"]).style == "chat"
    assert ja.load_model(folders["text"]).style == "plain"
    assert ja.load_model(folders["chat"], style="hh").style == "hh"


def test_a_prompt_can_have_five_forms(folders):
    policy = ja.load_model(folders["chat"])
    text = "the cat sat"
    expected = policy.prompt_ids(text)
    assert policy.prompt_ids([{"role": "user", "content": text}]) == expected
    assert policy.prompt_ids([Message("user", text)]) == expected
    assert policy.prompt_ids(Prompt("a", (Message("user", text),), "mine")) == expected
    assert policy.prompt_ids({"prompt": text, "gold": 3}) == expected
    assert policy.prompt_ids({"prompt": [{"role": "user", "content": text}]}) == expected
    assert policy.prompt_ids([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]) != expected


def test_a_plain_answer_continues_its_prompt(folders):
    policy = ja.load_model(folders["text"])
    prompt, answer = policy.prompt_ids("the cat"), policy.answer_ids(" sat on a mat")
    assert answer[-1] == policy.tokenizer.eos_id and policy.text(answer[:-1], prompt) == " sat on a mat"


@pytest.mark.parametrize(("prompt", "message"), [
    (3, "a prompt is '3'; a string, a list of {'role', 'content'}, or {'prompt': either} is expected"),
    ({"prompt": None}, "a prompt is 'None'"),
    ({"prompt": {"prompt": "x"}}, "a prompt is"),
    ([], "a prompt is '\\[\\]'"),
    ({"role": "user", "content": "x"}, "a prompt is"),
    ([{"role": "robot", "content": "x"}], "a message of a prompt is .*; {'role': 'system', 'user' or 'assistant'"),
    (["x"], "a message of a prompt is 'x'"),
])
def test_a_prompt_of_another_form_is_refused(folders, prompt, message):
    with pytest.raises(ja.UserError, match=message):
        ja.load_model(folders["chat"]).prompt_ids(prompt)


def test_the_style_plain_accepts_one_text(folders):
    policy = ja.load_model(folders["text"])
    with pytest.raises(ja.UserError, match="dialogue of 2 messages, but the style plain continues a single text"):
        policy.prompt_ids([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(ja.UserError, match="has no tokens"):
        policy.prompt_ids("")


def test_a_saved_model_is_the_same_model(folders, tmp_path):
    policy = ja.load_model(folders["chat"])
    changed = policy.with_params(jax.tree.map(lambda x: x + 0.5, policy.params))
    changed.save(tmp_path / "out")
    again = ja.load_model(tmp_path / "out")
    chex.assert_trees_all_equal(again.params, changed.params)
    assert again.model == policy.model and again.style == "chat"
    with pytest.raises(ja.UserError, match="already exists"):
        changed.save(tmp_path / "out")


@pytest.mark.medium
def test_adapters_are_saved_separately_or_merged(folders, tmp_path):
    policy = ja.load_model(folders["chat"], lora=ja.Lora(rank=2, alpha=4.0))
    assert set(policy.params) == {"adapters"} and "embedding" in policy.frozen
    policy = policy.with_params(jax.tree.map(lambda x: x + 0.1, policy.params))
    policy.save(tmp_path / "whole")
    policy.save(tmp_path / "peft", adapters=True)
    assert load_tokenizer(tmp_path / "peft").encode("the cat") == policy.tokenizer.encode("the cat")
    tokens = np.asarray([policy.prompt_ids("the cat sat on a mat")], np.int32)
    expected = policy.model.hidden(policy.weights, tokens)
    whole = ja.load_model(tmp_path / "whole")
    both = ja.load_model(folders["chat"], lora=ja.Lora(path=str(tmp_path / "peft")))
    for found in (whole, both):
        chex.assert_trees_all_close(found.model.hidden(found.weights, tokens), expected, atol=1e-5)
    with pytest.raises(ja.UserError, match="has no adapters to save"):
        whole.save(tmp_path / "none", adapters=True)


@pytest.mark.medium
def test_a_folder_of_adapters_is_recognised_and_the_remedies_of_its_message_work(folders, tmp_path):
    base, peft = folders["text"], tmp_path / "peft"
    policy = ja.load_model(base, lora=ja.Lora(rank=2))
    policy = policy.with_params(jax.tree.map(lambda x: x + 0.1, policy.params))
    policy.save(peft, adapters=True)
    with pytest.raises(ja.UserError, match=f"^{peft} has only adapters .adapter_config.json. of the base model ") as raised:
        ja.load_model(peft)
    path, merge = re.search(r"lora.path to (.*?), or merge both with jaxalign\.(load_model.*NEW\))", str(raised.value)).groups()
    eval(f"ja.{merge.replace('jaxalign.', 'ja.')}", {"ja": ja, "BASE": base, "NEW": tmp_path / "new"})
    tokens = np.asarray([policy.prompt_ids("the cat sat on a mat")], np.int32)
    expected = policy.model.hidden(policy.weights, tokens)
    for found in (ja.load_model(tmp_path / "new"), ja.load_model(base, lora=ja.Lora(path=path))):
        chex.assert_trees_all_close(found.model.hidden(found.weights, tokens), expected, atol=1e-5)
    config = json.loads((peft / "adapter_config.json").read_text())
    (peft / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["score"]}))
    with pytest.raises(ja.UserError, match="merge_and_unload"):  # load_model refuses adapters of a reward model.
        ja.load_model(peft)


def test_wrong_arguments_are_refused(folders, tmp_path):
    for arguments, message in (
        ({"folder": tmp_path / "none"}, "is not a folder; give the folder of a model, or of a stage"),
        ({"max_length": 97}, "max_length is 97, but .* supports at most 96 positions"),
        ({"style": "xml"}, "style is 'xml'; it must be one of plain, chat, hh, compact"),
        ({"style": "compact"}, "has no symbol '<user>'"),
        ({"lora": ja.Lora()}, "lora.rank is 0 and lora.path is empty"),
        ({"lora": ja.Lora(rank=8, path="A")}, "^lora.rank is 8 but lora.path .* adapter_config.json determines rank"),
        ({"mesh": ja.Mesh(fsdp=16)}, "asks for fsdp=16 = 16 devices"),
    ):
        with pytest.raises(ja.UserError, match=message):
            ja.load_model(**{"folder": folders["chat"]} | arguments)


@pytest.mark.slow
def test_answers_do_not_depend_on_the_mesh_or_the_batch(folders):
    prompts = ["the cat", "a dog ran", "the house"]
    settings = {"temperature": 1.0, "seed": 4}
    expected = ja.Sampler(ja.load_model(folders["chat"]), **settings).generate(prompts, max_new_tokens=8, n=2)
    assert len(expected) == 6 and len(set(expected.texts)) > 1
    for sample in expected:
        chex.assert_shape(sample.logprobs, (len(sample.ids),))
    small = ja.Sampler(ja.load_model(folders["chat"]), batch=2, **settings).generate(prompts, max_new_tokens=8, n=2)
    meshed = ja.load_model(folders["chat"], ja.Mesh(fsdp=2, tensor=2))
    wide = ja.Sampler(meshed, **settings).generate(prompts, max_new_tokens=8, n=2)
    assert small.ids == expected.ids == wide.ids and wide.texts == expected.texts


def test_each_call_draws_new_answers_and_an_equal_seed_the_same(folders):
    policy = ja.load_model(folders["chat"])
    one, two = (ja.Sampler(policy, seed=1) for _ in range(2))
    first, second = (one.generate(["the cat"], max_new_tokens=12) for _ in range(2))
    assert first.ids != second.ids and first.ids == two.generate(["the cat"], max_new_tokens=12).ids


def test_a_sampler_follows_the_policy(folders):
    policy = ja.load_model(folders["chat"])
    sampler = ja.Sampler(policy, temperature=0.0)
    before = sampler.generate(["the cat"], max_new_tokens=12)
    rng = np.random.default_rng(0)
    other = policy.with_params(jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype(x.dtype), policy.params))
    sampler.update(other)
    assert sampler.generate(["the cat"], max_new_tokens=12).ids != before.ids
    with pytest.raises(ja.UserError, match="architecture or mesh differs"):
        sampler.update(ja.load_model(folders["chat"], compute_dtype="bfloat16"))


@pytest.mark.parametrize(("prompts", "options", "message"), [
    ("the cat", {}, "prompts is 'the cat'; a list of at least one prompt"),
    ([], {}, "a list of at least one prompt is expected"),
    (["x"], {"n": 0}, "n is 0; it must be at least 1"),
    (["x"], {"max_new_tokens": 0}, "max_new_tokens is 0"),
    (["the cat " * 60], {}, r"prompts\[0\] has no answer: a prompt has"),
])
def test_wrong_prompts_are_refused(folders, prompts, options, message):
    with pytest.raises(ja.UserError, match=message):
        ja.Sampler(ja.load_model(folders["text"])).generate(prompts, **options)
