"""PEFT folders: reading those of `peft`, writing folders that `peft` loads, and equal results."""

from __future__ import annotations

import json
import shutil
import warnings

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import hugging, tiny

peft, torch = hugging.peft, hugging.torch

from jaxalign.errors import UserError  # noqa: E402
from jaxalign.models.adapters.lora import LoraAdapters, join, merge  # noqa: E402
from jaxalign.models.adapters.peft_folder import export_adapters, load_adapters  # noqa: E402
from jaxalign.models.model import Model  # noqa: E402
from jaxalign.parallel.mesh import make_mesh  # noqa: E402
from jaxalign.parallel.sharding import Sharding  # noqa: E402
from jaxalign.registry.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.parity

CASES = [
    ("llama", False, {}), ("llama", False, {"use_dora": True, "target_modules": ("q_proj", "down_proj")}),
    ("llama", True, {"use_rslora": True, "lora_alpha": 4}), ("qwen2", False, {"use_rslora": True, "target_modules": ".*_proj"}),
    ("qwen2", True, {"use_dora": True}), ("gemma", False, {"use_dora": True}), ("gpt_neox", False, {}),
    ("gpt_neox", False, {"use_dora": True, "use_rslora": True}), ("gpt_neox", True, {"target_modules": ("query_key_value",)}),
]


def ours(kind, scalar, folder, mesh=None):
    """Return (model, parameters) of a saved folder, on the tiny base of that kind."""
    theirs = hugging.torch_model(kind, scalar)
    sharding = Sharding(make_mesh(*(mesh or ())))
    base = Model(hugging.decoder_config(theirs), sharding=sharding)
    lora, own = load_adapters(folder, FAMILIES.get(kind), base)
    model = Model(base.config, "scalar" if scalar else "lm", sharding, lora)
    return model, join(hugging.params_of(theirs, "scalar" if scalar else "lm"), own)


def outputs(model, params, tokens=hugging.TOKENS):
    """Logits [B, T, V], or the last token's score [B, 1] for classifiers."""
    hidden = tiny.all_hidden(model, params, tokens)
    return np.asarray(model.scores(params, hidden[:, -1:]) if model.head == "scalar" else model.logits(params, hidden))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def loaded(kind, scalar, folder):
    """The tiny base with the adapters of a folder, loaded by `peft`; its warnings about missing parts are errors here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        return peft.PeftModel.from_pretrained(hugging.torch_model(kind, scalar), folder).eval()


@pytest.mark.parametrize(("kind", "scalar", "changes"), CASES)
def test_adapters_of_peft_are_read_and_written_back(kind, scalar, changes, tmp_path):
    """A trained adapter of peft computes the same here, and the written folder equals the one that was read, weight for
    weight."""
    theirs = hugging.adapted(kind, scalar, **changes)
    theirs.save_pretrained(tmp_path / "in")
    model, params = ours(kind, scalar, tmp_path / "in")
    expected = hugging.logits(theirs)
    close(outputs(model, params), expected)
    export_adapters(tmp_path / "out", FAMILIES.get(kind), model, params, "their/base")
    close(hugging.logits(loaded(kind, scalar, tmp_path / "out")), expected)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    ("kind", "scalar", "settings"),
    [("llama", False, {}), ("llama", True, {"dora": True}), ("gpt_neox", False, {}),
     ("gpt_neox", False, {"rank_stabilised": True}), ("gpt_neox", False, {"dora": True}),
     ("gpt_neox", False, {"targets": ("q_proj", "v_proj", "mlp.up")}), ("gemma", False, {"targets": ("attention.*",)})],
)
def test_adapters_trained_here_are_written_and_read_back(kind, scalar, settings, tmp_path):
    """The kernels of a fused module have different "a" here: peft gets one adapter of three times the rank, which is split
    again."""
    lora = LoraAdapters(**{"rank": 2, "alpha": 3.0, "targets": ("*",)} | settings)
    theirs = hugging.torch_model(kind, scalar)
    base = hugging.params_of(theirs, "scalar" if scalar else "lm")
    model = Model(hugging.decoder_config(theirs), "scalar" if scalar else "lm", lora=lora)
    rng = np.random.default_rng(0)
    fresh = model.init_adapters(base, jax.random.key(0))
    own = jax.tree.map(lambda x: np.asarray(x) + 0.3 * rng.normal(size=x.shape).astype(np.float32), fresh)
    export_adapters(tmp_path / "out", FAMILIES.get(kind), model, own)
    expected = outputs(model, join(base, own))
    close(hugging.logits(loaded(kind, scalar, tmp_path / "out")), expected)
    back, params = ours(kind, scalar, tmp_path / "out")
    assert set(back.lora.adapted(base["blocks"])) == set(lora.adapted(base["blocks"]))
    assert (back.lora.rank, back.lora.rank_stabilised, back.lora.dora) == (2, lora.rank_stabilised, lora.dora)
    assert back.lora.alpha == pytest.approx(3.0, rel=1e-6)
    chex.assert_trees_all_equal({name: params[name] for name in own}, own)
    if not scalar:
        close(outputs(model.base, merge(lora, join(base, own))), expected)


def test_a_mesh_changes_nothing(tmp_path):
    theirs = hugging.adapted("llama", True, use_dora=True)
    theirs.save_pretrained(tmp_path / "in")
    model, params = ours("llama", True, tmp_path / "in", (2, 2, 2))
    own = {name: params[name] for name in model.abstract()}
    assert jax.tree.map(lambda x: x.sharding, own) == model.shardings()
    export_adapters(tmp_path / "out", FAMILIES.get("llama"), model, own)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / "adapters"
    hugging.adapted("llama", True).save_pretrained(folder)
    return folder


def broken(saved, tmp_path, config=None, weights=None, drop=()):
    """A copy of a folder with other config fields, other weights, or without some weights."""
    folder = tmp_path / "broken"
    shutil.copytree(saved, folder)
    if config:
        raw = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(raw | config))
    if weights or drop:
        tensors = load_file(folder / "adapter_model.safetensors") | (weights or {})
        save_file({n: v for n, v in tensors.items() if n not in drop}, folder / "adapter_model.safetensors")
    return folder


def read(folder):
    return load_adapters(folder, FAMILIES.get("llama"), Model(hugging.decoder_config(hugging.torch_model("llama"))))


Q = "base_model.model.model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'.*'LORA' is expected"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"layers_to_transform": [0]}, r"layers_to_transform is '\[0\]'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is .*experts.gate_up_proj"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"lora_bias": True}, "lora_bias is 'True'"),
        ({"a_new_trick": 1}, "a_new_trick is '1'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has lm_head"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ["embed_tokens"]}, "target_modules has embed_tokens"),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, "matches model.layers.0.* but not model.layers.1"),
        ({"target_modules": "c_attn"}, "target_modules is 'c_attn', which matches no linear layer"),
        ({"target_modules": "(q_proj"}, "is not a regular expression"),
        ({"target_modules": 3}, "target_modules is 3"), ({"target_modules": ["\n"]}, r"target_modules has \\n, which"),
        ({"target_modules": r"([\w.]|.)*[!?]"}, "takes more than"),
        ({"modules_to_save": 3}, "modules_to_save is 3"), ({"modules_to_save": [None]}, r"modules_to_save is \[None\]"),
        ({"rank_pattern": {"q_proj": 7}}, "rank_pattern gives .*q_proj rank 7 and others 3"),
        ({"alpha_pattern": {"q_proj": 50}}, "alpha_pattern scales the adapter of .* by"),
        ({"r": 0}, "r is 0"), ({"lora_alpha": "x"}, "lora_alpha is 'x'"), ({"use_dora": "yes"}, "use_dora is 'yes'"),
    ],
)
def test_unsupported_features_of_peft_are_refused_by_name(saved, tmp_path, config, said):
    with pytest.raises(UserError, match=said) as refused:
        read(broken(saved, tmp_path, config))
    assert "\n" not in str(refused.value) and "adapter_config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("weights", "drop", "said"),
    [
        ({}, (Q + "lora_A.weight",), "weights are missing: .*layers.1.self_attn.q_proj.lora_A.weight"),
        ({"base_model.model.lm_head.weight": np.zeros((37, 20), np.float32)}, (), "are unexpected.*lm_head.weight"),
        ({Q + "lora_B.weight": np.zeros((24, 4), np.float32)}, (), r"q_proj.lora_B.weight is \[24, 4\], \[24, 3\] expected"),
        ({Q + "lora_B.weight": np.zeros((24, 3), np.int32)}, (), "not in one of .*q_proj.lora_B.weight is I32"),
        ({Q + "lora_B.weight": np.full((24, 3), np.nan, np.float32)}, (), "q_proj.lora_B.weight contains non-finite numbers"),
        ({}, ("base_model.model.score.weight",), "weights are missing: base_model.model.score.weight"),
    ],
)
def test_damaged_weights_are_reported_in_one_sentence(saved, tmp_path, weights, drop, said):
    with pytest.raises(UserError, match=said) as refused:
        read(broken(saved, tmp_path, weights=weights, drop=drop))
    assert "\n" not in str(refused.value)


def test_missing_and_broken_files_are_refused(saved, tmp_path):
    with pytest.raises(UserError, match="adapter_config.json does not exist"):
        read(tmp_path)
    with pytest.raises(UserError, match="adapter_config.json does not exist"):
        read(tmp_path / ("x" * 300))
    folder = broken(saved, tmp_path)
    content = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(content[:-100])
    with pytest.raises(UserError, match="is truncated"):
        read(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="adapter_model.bin is not read"):
        read(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read(folder)


def test_dropout_gets_a_warning_and_half_precision_is_read(saved, tmp_path, caplog):
    tensors = load_file(saved / "adapter_model.safetensors")
    half = {name: value.astype(np.float16) for name, value in tensors.items()}
    _, params = read(broken(saved, tmp_path, {"lora_dropout": 0.1}, half))
    assert "lora_dropout is 0.1" in caplog.text
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_a_folder_is_written_completely_or_not_at_all(saved, tmp_path, monkeypatch):
    lora, own = read(saved)
    model = Model(hugging.decoder_config(hugging.torch_model("llama")), "scalar", lora=lora)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    with pytest.raises(UserError, match="already exists"):
        export_adapters(tmp_path / "full", FAMILIES.get("llama"), model, own)

    def failing(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("jaxalign.models.adapters.peft_folder.save_file", failing)
    with pytest.raises(OSError):
        export_adapters(tmp_path / "out", FAMILIES.get("llama"), model, own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_dora_on_a_part_of_a_fused_module_cannot_be_exported(tmp_path):
    model = Model(hugging.decoder_config(hugging.torch_model("gpt_neox")), lora=LoraAdapters(2, 1.0, ("q_proj",), dora=True))
    own = model.init_adapters(hugging.params_of(hugging.torch_model("gpt_neox")), jax.random.key(0))
    with pytest.raises(UserError, match="DoRA adapts only a part of .*query_key_value"):
        export_adapters(tmp_path / "out", FAMILIES.get("gpt_neox"), model, own)
