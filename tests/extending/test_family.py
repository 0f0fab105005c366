"""A user's model family: its folders are read and written, and a config can name it."""

from __future__ import annotations

import json
import pathlib

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy

import jaxalign as ja
from jaxalign.config import from_config_dict
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.export import export
from jaxalign.models.configured import configured_decoder
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from jaxalign.registry.families import FAMILIES, Family
from tests import made_tokenizers

PLUGIN = pathlib.Path(__file__).parent / "plugins" / "family.py"
NAME = f"{PLUGIN}:FAMILY"


@pytest.fixture
def folder(tmp_path):
    """A random model of the family: a Llama folder with renamed tensors."""
    texts = made_tokenizers.qwen(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(texts)
    model = Model(DecoderConfig(tokenizer.vocab_size, 2, 16, 4, 2, 4, 20))
    raw = config_json(model.config, 96) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    folder = tmp_path / "hf"
    export(folder, model, model.init(jax.random.key(0)), config=raw, source=texts)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "body."): value for name, value in tensors.items()}
    safetensors.numpy.save_file(renamed, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "swallow", "architectures": ["SwallowForCausalLM"], "scaled_input": True}
    (folder / "config.json").write_text(json.dumps(fields))
    yield folder
    FAMILIES.unregister("swallow")


def test_its_folders_are_read_and_written(folder, tmp_path):
    with pytest.raises(ja.UserError, match="model_type is 'swallow', which is not supported; llama, .* a family of your own"):
        ja.load_model(folder)
    policy = ja.load_model(folder, family=NAME)
    assert policy.model.config.scale_embeddings
    policy.save(tmp_path / "again")
    again = ja.load_model(tmp_path / "again")  # The family is registered now.
    assert again.model == policy.model
    chex.assert_trees_all_equal(again.params, policy.params)
    tokens = np.asarray([policy.prompt_ids("the cat")], np.int32)
    chex.assert_tree_all_finite(policy.model.hidden(policy.weights, tokens))


def test_a_config_can_name_it(folder):
    config = from_config_dict({"model": {"source": "huggingface", "path": str(folder), "family": NAME}})
    decoder, family = configured_decoder(config, 0)
    assert decoder.scale_embeddings and family.model_type == "swallow"


@pytest.mark.parametrize(("model", "message"), [
    ({"family": NAME}, "config.model.family is"),
    ({"source": "huggingface", "path": "x", "family": f"{PLUGIN}:weights"}, "a jaxalign Family is expected"),
    ({"source": "huggingface", "path": "x", "family": "no_such_module:FAMILY"}, "no_such_module cannot be imported"),
])
def test_an_invalid_name_is_refused(model, message):
    with pytest.raises(ja.UserError, match=message):
        from_config_dict({"model": model})


def test_a_taken_name_and_wrong_fields_are_refused(folder):
    with pytest.raises(ja.UserError, match="'llama' is already registered"):
        FAMILIES.register(Family("llama", "LlamaForCausalLM", lambda fields: {}, lambda config: ()))
    broken = Family("swallow", "SwallowForCausalLM", lambda fields: {"layer": 3}, lambda config: ())
    with pytest.raises(ja.UserError, match="'swallow' does not give the arguments of DecoderConfig"):
        ja.load_model(folder, family=broken)
