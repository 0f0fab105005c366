"""Exported checkpoints: `transformers` loads them with equal logits, and a failed export leaves nothing."""

from __future__ import annotations

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxalign.errors import UserError
from jaxalign.models import blocks
from jaxalign.models.checkpoints.export import export
from jaxalign.models.checkpoints.huggingface import load_params, read_config
from jaxalign.models.checkpoints.safetensors import open_weights
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding, one_device
from tests import tiny

_LLAMA = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}
_NEOX = {
    "model_type": "gpt_neox", "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 6,
    "vocab_size": 37, "max_position_embeddings": 64, "rotary_pct": 0.5, "hidden_act": "gelu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "use_parallel_residual": True,
}
_MOE = _LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}
_CONFIGS = {"llama": _LLAMA, "tied": _LLAMA | {"tie_word_embeddings": True}, "gpt_neox": _NEOX, "qwen3_moe": _MOE}
_TOKENS = [[3, 9, 0, 36, 7, 7, 1], [5, 2, 8, 30, 31, 4, 20], [1] * 7, [36, 2, 20, 2, 20, 2, 6]]


def _mesh():
    return Sharding(make_mesh(2, 2, 2))


def _folder(path, config, **changes):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def _model(tmp_path, config, head="lm", sharding=None, vocab_multiple=1):
    decoder = read_config(_folder(tmp_path / "config", config), vocab_multiple=vocab_multiple).decoder
    model = Model(decoder, head, sharding or one_device())
    # Move norms and biases away from their initial values, so that a missing one changes the result.
    params = tiny.to_host(model.init(jax.random.key(0)))
    params = jax.tree.map(lambda x: x + 0.1 * np.cos(np.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    return model, tiny.place(model, params)


def _theirs(folder, kind="AutoModelForCausalLM"):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor(_TOKENS)).logits.numpy()


def _ours(model, params):
    return np.asarray(tiny.all_logits(model, params, jnp.asarray(_TOKENS, jnp.int32)))


def _assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.variants(3)
@pytest.mark.parity
@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("name", list(_CONFIGS))
def test_transformers_loads_exported_models(tmp_path, monkeypatch, name, meshed):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)  # Many blocks per tensor.
    model, params = _model(tmp_path, _CONFIGS[name], sharding=_mesh() if meshed else None, vocab_multiple=8)
    assert params["embedding"].shape[0] == 40
    export(tmp_path / "out", model, params, config=_CONFIGS[name])
    _assert_close(_ours(model, params), _theirs(tmp_path / "out"))
    with open_weights(tmp_path / "out") as weights:
        table = "gpt_neox.embed_in.weight" if name == "gpt_neox" else "model.embed_tokens.weight"
        assert weights.shape(table) == (37, 24)
        assert ("lm_head.weight" in weights.names) == (name in ("llama", "qwen3_moe"))


@pytest.mark.parametrize("name", list(_CONFIGS))
def test_a_model_exported_from_one_mesh_is_loaded_onto_another(tmp_path, monkeypatch, name):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 512)
    model, params = _model(tmp_path, _CONFIGS[name], sharding=_mesh(), vocab_multiple=8)
    export(tmp_path / "out", model, params, config=_CONFIGS[name], shard_bytes=3000)
    for sharding in (one_device(), Sharding(make_mesh(1, 4, 2))):
        again = Model(model.config, "lm", sharding)
        loaded = load_params(tmp_path / "out", again)
        chex.assert_trees_all_equal_shapes(loaded, again.abstract())
        for name_of, table in (("embedding", loaded["embedding"]), ("unembedding", loaded.get("unembedding"))):
            if table is not None:
                padding = table[37:] if name_of == "embedding" else table[:, 37:]
                np.testing.assert_array_equal(padding, 0)

        def cut(tree):
            head = {"unembedding": tree["unembedding"][:, :37]} if "unembedding" in tree else {}
            return {**tree, "embedding": tree["embedding"][:37]} | head

        chex.assert_trees_all_equal(cut(loaded), cut(params))
        assert jax.tree.map(lambda x: x.sharding, loaded) == again.shardings()


@pytest.mark.parity
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe"])
def test_a_reward_model_is_loaded_and_exported(tmp_path, name):
    model, params = _model(tmp_path, _CONFIGS[name], "scalar", _mesh(), vocab_multiple=2)
    config = _CONFIGS[name] | {"pad_token_id": 0}
    export(tmp_path / "out", model, params, config=config)
    written = read_config(tmp_path / "out")
    assert (written.head, written.raw["id2label"]) == ("scalar", {"0": "LABEL_0"})
    loaded = load_params(tmp_path / "out", Model(model.config, "scalar"))
    params["embedding"] = params["embedding"].at[37:].set(0)
    chex.assert_trees_all_equal(loaded, params)
    last = tiny.all_hidden(model, params, jnp.asarray(_TOKENS, jnp.int32))[:, -1]
    theirs = _theirs(tmp_path / "out", "AutoModelForSequenceClassification")
    _assert_close(np.asarray(model.scores(params, last)), theirs[:, 0])
    with pytest.raises(UserError, match=r"a model with a scalar head \(.*Classification\); a language model is expected"):
        load_params(tmp_path / "out", Model(written.decoder, "lm"))


@pytest.mark.parity
def test_shards_saved_by_transformers_are_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**_LLAMA))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = Model(read_config(tmp_path / "theirs").decoder, "lm", Sharding(make_mesh(2, 2, 1)))
    _assert_close(_ours(model, load_params(tmp_path / "theirs", model)), _theirs(tmp_path / "theirs"))


@pytest.mark.parity
def test_a_reward_model_saved_by_transformers_is_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**_LLAMA, num_labels=1, pad_token_id=0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "theirs")
    found = read_config(tmp_path / "theirs")
    model = Model(found.decoder, found.head)
    params = load_params(tmp_path / "theirs", model)
    scores = model.scores(params, tiny.all_hidden(model, params, jnp.asarray(_TOKENS, jnp.int32))[:, -1])
    _assert_close(np.asarray(scores), _theirs(tmp_path / "theirs", "AutoModelForSequenceClassification")[:, 0])


def test_shards_have_the_chosen_size_and_an_index(tmp_path):
    model, params = _model(tmp_path, _LLAMA)
    export(tmp_path / "one", model, params, config=_LLAMA)
    export(tmp_path / "many", model, params, config=_LLAMA, shard_bytes=5000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("many/*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    assert set(index["weight_map"]) == set(whole)
    for file in files:
        tensors = load_file(file)
        assert sum(value.nbytes for value in tensors.values()) <= 5000 or len(tensors) == 1
        for name, value in tensors.items():
            assert index["weight_map"][name] == file.name
            np.testing.assert_array_equal(value, whole[name])
        with safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parity
@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_other_dtypes_round_each_weight_once(tmp_path, dtype, step):
    model, params = _model(tmp_path, _LLAMA)
    export(tmp_path / "out", model, params, config=_LLAMA | {"dtype": "float32"}, dtype=dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    loaded = load_params(tmp_path / "out", model, dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {dtype}
    chex.assert_trees_all_close(jax.tree.map(lambda x: x.astype(jnp.float32), loaded), params, rtol=step, atol=1e-7)
    _theirs(tmp_path / "out")


def test_files_and_fields_of_the_source_are_kept(tmp_path):
    config = _LLAMA | {"torch_dtype": "float16", "pretraining_tp": 1}
    source = _folder(tmp_path / "source", config)
    texts = {name: f"{name} of the source" for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")}
    texts["generation_config.json"] = '{"temperature": 0.7}'
    for name, text in (texts | {"notes.txt": "not a part of it"}).items():
        (source / name).write_text(text)
    model, params = _model(tmp_path, config)
    export(tmp_path / "out", model, params, config=config, source=source, files={"made.json": "{}"})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "made.json", *texts}
    assert all((tmp_path / "out" / name).read_text() == text for name, text in texts.items())
    expected = config | {"torch_dtype": "float32", "architectures": ["LlamaForCausalLM"]}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


def test_a_failed_export_leaves_nothing(tmp_path):
    model, params = _model(tmp_path, _LLAMA)
    params["blocks"]["mlp"]["up"] = params["blocks"]["mlp"]["up"].at[1, 2, 3].set(jnp.nan)
    with pytest.raises(UserError, match=r"nothing was written: .*\.1\.mlp\.up_proj\.weight contains numbers that are not f"):
        export(tmp_path / "out", model, params, config=_LLAMA)
    params["blocks"]["mlp"]["up"] = params["blocks"]["mlp"]["up"].at[1, 2, 3].set(1e6)
    with pytest.raises(UserError, match="too large for float16; choose another dtype"):
        export(tmp_path / "out", model, params, config=_LLAMA, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_a_non_empty_folder_is_not_overwritten(tmp_path):
    model, params = _model(tmp_path, _LLAMA)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="out already exists; give the name of a new folder"):
        export(tmp_path / "out", model, params, config=_LLAMA)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    export(tmp_path / "out", model, params, config=_LLAMA)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_weights_too_large_for_the_chosen_dtype_are_reported_when_loading(tmp_path):
    model, params = _model(tmp_path, _LLAMA)
    export(tmp_path / "out", model, params, config=_LLAMA)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, pathlib.Path(tmp_path / "out" / "model.safetensors"))
    with pytest.raises(UserError, match=r"model\.norm\.weight in .* contains numbers too large for float16; choose"):
        load_params(tmp_path / "out", model, "float16")
    assert load_params(tmp_path / "out", model, "bfloat16")["final_norm"]["scale"].dtype == jnp.bfloat16
