"""Hugging Face checkpoints: a Llama equals an independent numpy forward pass and published greedy output."""

from __future__ import annotations

import json
import math

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.adapters.quantised import quantise
from jaxalign.models.checkpoints import huggingface
from jaxalign.models.checkpoints.huggingface import check_length, check_vocabulary, load_params, read_config
from jaxalign.models.checkpoints.layout import places
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import make_mesh
from jaxalign.parallel.sharding import Sharding
from jaxalign.rollout.sampler import Engine, LocalSampler, respond
from jaxalign.rollout.sampling import Sampling
from tests import tiny

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,  # not hidden_size / heads
    "vocab_size": 36,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tensors(config, seed=0):
    """A random checkpoint in the layout of its file: projections are [out, in]."""
    random = np.random.default_rng(seed)
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
        shapes |= {at + f"self_attn.{n}_proj.weight": (kv, D) for n in "kv"}
        shapes |= {at + "self_attn.q_proj.weight": (q, D), at + "self_attn.o_proj.weight": (D, q)}
        shapes |= {at + f"mlp.{n}_proj.weight": (F, D) for n in ("gate", "up")} | {at + "mlp.down_proj.weight": (D, F)}
    return {name: random.normal(0.3, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def _write(folder, config=_CONFIG, tensors=None, **changes):
    config = config | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def _norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * scale


def _turned(x, position, base):
    """Rotary positions by complex numbers: dimension j pairs with j + h/2 (the layout of Hugging Face Llama)."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position / base ** (np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def _numpy_logits(config, w, tokens):
    """Llama, one position, one head and one matrix-vector product at a time, in float64; [T, V]."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    H, K, h, eps = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"))
    x = [w["model.embed_tokens.weight"][t] for t in tokens]
    for i in range(config["num_hidden_layers"]):
        p = {
            name.removeprefix(f"model.layers.{i}."): v for name, v in w.items() if name.startswith(f"model.layers.{i}.")
        }
        keys, values = [], []
        for t in range(len(tokens)):
            normed = _norm(x[t], p["input_layernorm.weight"], eps)
            q = (p["self_attn.q_proj.weight"] @ normed).reshape(H, h)
            k = (p["self_attn.k_proj.weight"] @ normed).reshape(K, h)
            keys.append([_turned(k[g], t, config["rope_theta"]) for g in range(K)])
            values.append((p["self_attn.v_proj.weight"] @ normed).reshape(K, h))
            heads = []
            for n in range(H):
                g = n // (H // K)
                score = np.array([_turned(q[n], t, config["rope_theta"]) @ key[g] for key in keys]) / np.sqrt(h)
                weight = np.exp(score - score.max())
                heads.append(sum(a * v[g] for a, v in zip(weight / weight.sum(), values, strict=True)))
            x[t] = x[t] + p["self_attn.o_proj.weight"] @ np.concatenate(heads)
            normed = _norm(x[t], p["post_attention_layernorm.weight"], eps)
            gate = p["mlp.gate_proj.weight"] @ normed
            x[t] = x[t] + p["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (p["mlp.up_proj.weight"] @ normed))
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return np.stack([head @ _norm(one, w["model.norm.weight"], eps) for one in x])


def _logits(folder, tokens):
    model = Model(read_config(folder).decoder)
    params = load_params(folder, model)
    return tiny.all_hidden(model, params, jnp.asarray(tokens, jnp.int32)[None])[0] @ model.unembedding(params)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_an_independent_forward_pass(tmp_path, tied):
    config = _CONFIG | {"tie_word_embeddings": tied}
    tensors = _tensors(config)
    tokens = [1, 30, 7, 7, 12, 0, 35]
    expected = _numpy_logits(config, tensors, tokens)
    actual = _logits(_write(tmp_path / "hf", config, tensors), tokens)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_a_sharded_model_is_loaded_onto_its_mesh(tmp_path):
    folder = _write(tmp_path / "hf")
    model = Model(read_config(folder).decoder, sharding=Sharding(make_mesh(2, 2, 2)))
    sharded, whole = load_params(folder, model), load_params(folder, Model(model.config))
    assert jax.tree.map(lambda x: x.sharding, sharded) == model.shardings()
    query = sharded["blocks"]["attention"]["query"]
    assert query.addressable_shards[0].data.shape == (3, 16 // 2, 4 // 2, 6)  # L, D over fsdp, H over tensor, h
    chex.assert_trees_all_equal(sharded, whole)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "nf4"])
def test_a_base_is_stored_in_its_kind_while_it_is_read(tmp_path, monkeypatch, kind, stored):
    """The result equals that of a conversion after reading, without the whole model in float32 on the device."""
    tensors = {name: value.astype(ml_dtypes.bfloat16 if stored == "bfloat16" else "float32")
               for name, value in _tensors(_CONFIG).items()}
    folder = _write(tmp_path / "hf", tensors=tensors)
    model = Model(read_config(folder).decoder)
    expected = quantise(load_params(folder, model), kind)
    before, most, largest = {id(x) for x in jax.live_arrays()}, 0, 0
    place = huggingface.place_blocks

    def placed(*arguments):
        nonlocal most, largest
        value = place(*arguments)
        most = max(most, sum(x.nbytes for x in jax.live_arrays() if id(x) not in before))
        largest = max(largest, value.nbytes)
        return value

    monkeypatch.setattr(huggingface, "place_blocks", placed)
    params = load_params(folder, model, kind=kind)
    chex.assert_trees_all_equal(params, expected)
    assert most <= sum(x.nbytes for x in jax.tree.leaves(expected)) + largest


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 4), r"mesh\.tensor is 4; it must divide the checkpoint's key/value heads \(2\)"),
        ((1, 3, 1), r"mesh\.fsdp is 3; it must divide the checkpoint's hidden size \(16\)"),
    ],
)
def test_a_mesh_that_does_not_divide_the_checkpoint_is_refused(tmp_path, shape, message):
    folder = _write(tmp_path / "hf")
    with pytest.raises(UserError, match=message):
        load_params(folder, Model(read_config(folder).decoder, sharding=Sharding(make_mesh(*shape))))


def test_the_tree_equals_that_of_the_decoder(tmp_path):
    model = Model(read_config(_write(tmp_path / "hf")).decoder)
    chex.assert_trees_all_equal_shapes_and_dtypes(load_params(tmp_path / "hf", model), model.abstract())


def test_rotary_tables_and_a_tied_head_in_the_file_are_not_unexpected(tmp_path):
    tensors = _tensors(_CONFIG)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32) for i in range(3)}
    tensors |= tables | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    folder = _write(tmp_path / "hf", tensors=tensors, tie_word_embeddings=True)
    assert "unembedding" not in load_params(folder, Model(read_config(folder).decoder))


def test_the_masks_and_tables_of_old_neox_files_are_not_unexpected(tmp_path):
    config = {
        "model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 9, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.25, "hidden_act": "gelu",
    }
    folder = _write(tmp_path / "hf", config, {})
    model = Model(read_config(folder).decoder)
    tensors = {
        place.name(number): np.ones(place.layout.stored_shape, np.float32)
        for place in places(read_config(folder).family, model) for number in np.ndindex(place.stack)
    }
    at = "gpt_neox.layers.0.attention."
    old = {f"{at}bias": np.ones((1, 1, 8, 8), np.uint8), f"{at}masked_bias": np.array(-1e9, np.float32)}
    old[f"{at}rotary_emb.inv_freq"] = np.ones(1, np.float32)
    save_file(tensors | old, folder / "model.safetensors")
    assert load_params(folder, model)["blocks"]["attention"]["query"].shape == (1, 16, 2, 8)
    save_file(tensors | {f"{at}dense.scale": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"the model does not have the weights gpt_neox\.layers\.0\.attention\.dense\.scale"):
        load_params(folder, model)


@pytest.mark.parametrize("rows", [36, 35])
def test_a_head_that_a_tied_model_cannot_have_is_refused(tmp_path, rows):
    tensors = _tensors(_CONFIG | {"tie_word_embeddings": True})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:rows].copy()
    tensors["lm_head.weight"][-1, -1] += 1e-3
    folder = _write(tmp_path / "hf", tensors=tensors, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head\.weight that differs from model\.embed_tokens\.weight, though"):
        load_params(folder, Model(read_config(folder).decoder))


def test_fields_missing_in_config_json_have_the_defaults_of_the_format(tmp_path):
    needed = (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    decoder = read_config(_write(tmp_path / "hf", {}, {}, **{name: _CONFIG[name] for name in needed})).decoder
    assert (decoder.kv_heads, decoder.head_dim) == (4, 4)
    assert (decoder.rope_base, decoder.norm_eps, decoder.tie_embeddings) == (10000.0, 1e-6, False)


def test_rope_theta_is_read_where_newer_files_keep_it(tmp_path):
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    folder = _write(tmp_path / "hf", {k: v for k, v in _CONFIG.items() if k != "rope_theta"}, {}, rope_parameters=rope)
    assert read_config(folder).decoder.rope_base == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "model_type is 'opt', which is not supported; llama, mistral, .* is expected"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"a_new_feature": 1}, "a_new_feature is '1', which this model family does not support"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 8.0}}, "rope_type.* is 'proportional', which is not"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "8"}}, "factor is '8'; a positive float"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor is '1.0'"),
        ({"rope_scaling": {"rope_type": "yarn", "rope_theta": 1}}, "rope_theta is 1.0"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 factors, but rotate 3"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, -2], "long_factor": [1]}}, r"short_factor\[1\] is -2"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 3, "long_factor": [1]}}, "short_factor is 3; a list"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale is '1.0'"),
        ({"architectures": ["LlamaForTokenClassification"]}, r"architectures is .*\['LlamaForCausalLM'\] or"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "Classification with 2 labels; one label, the reward"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}, "with 3 labels"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": 3}, "with 3 labels"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; a token id is expected"),
        ({"vocab_size": None}, "vocab_size is None; a positive int is expected"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'; a positive int"),
        ({"hidden_size": True}, "hidden_size is True; a positive int"),
        ({"num_key_value_heads": 3}, r"config\.json: .*kv_heads"),
        ({"head_dim": 5}, r"config\.json: .*even"),
    ],
)
def test_features_that_the_decoder_lacks_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read_config(_write(tmp_path / "hf", _CONFIG, {}, **changes))


def test_the_work_directory_of_a_run_is_not_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0, "stages": ["sft", "ppo"]}))
    with pytest.raises(UserError, match="is the work directory of a run; give the folder of one of its models, such as .*/ppo"):
        read_config(tmp_path)


def test_positions_end_where_longrope_would_change_the_frequencies(tmp_path):
    scaling = {"rope_type": "longrope", "short_factor": [1, 2, 3], "long_factor": [9, 9, 9], "factor": 4,
               "original_max_position_embeddings": 24}
    config = read_config(_write(tmp_path / "hf", _CONFIG, {}, rope_scaling=scaling))
    assert config.max_positions == 24
    with pytest.raises(UserError, match="model.max_length is 25, but .* supports at most 24 positions"):
        check_length(tmp_path / "hf", config, 25)


@pytest.mark.parametrize(("field", "value"), [
    *((field, value) for field in ("rms_norm_eps", "rope_theta") for value in (math.nan, math.inf, 1e39, 1e-50, 10**300)),
    *(("rope_scaling", {"rope_type": "linear", "factor": value}) for value in (math.nan, math.inf)),
    ("num_hidden_layers", 10**9), ("hidden_size", 2**40), ("bos_token_id", -1), ("bos_token_id", 10**9),
    ("eos_token_id", [2, -1]),
])
def test_numbers_that_no_model_has_are_refused_by_name(tmp_path, field, value):
    with pytest.raises(UserError, match=f"config.json: {'factor' if field == 'rope_scaling' else field} is .*expected"):
        read_config(_write(tmp_path / "hf", _CONFIG, {}, **{field: value}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"text_config": None}, "text_config is 'None'; the fields of the text model are expected, since model_type is 'llava'"),
    ({"text_config": {"model_type": "opt"}}, "model_type is 'opt', which is not supported"),
    ({"text_config": _CONFIG, "architectures": ["LlavaForTokenClassification"]}, "a ...ForConditionalGeneration is"),
])
def test_a_multimodal_model_without_a_known_text_model_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read_config(_write(tmp_path / "hf", {"model_type": "llava"}, {}, **changes))


def test_a_multimodal_config_lacks_the_sizes_that_are_usual(tmp_path):
    text = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "model_type": "gemma3_text"}
    config = read_config(_write(tmp_path / "hf", {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, {}))
    assert (config.decoder.vocab, config.decoder.heads, config.decoder.kv_heads, config.eos_ids) == (262208, 8, 4, (1, 106))
    assert (config.family.model_type, config.wrapper) == ("gemma3_text", "gemma3")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "contains a list; an object is expected"), ("{}", "has no model_type")]
)
def test_a_broken_config_is_reported_in_one_sentence(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)
    with pytest.raises(UserError, match=r"config\.json does not exist; a folder in Hugging Face format"):
        read_config(tmp_path / "none")


def test_the_parent_of_a_model_folder_is_refused_with_the_folder(tmp_path):
    (tmp_path / "parent" / "hf").mkdir(parents=True)
    (tmp_path / "parent" / "hf" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"with config\.json, is expected: .*parent/hf has one$"):
        read_config(tmp_path / "parent")


def test_weights_that_do_not_fit_the_config_are_listed(tmp_path):
    folder = _write(tmp_path / "hf")
    layers_3 = Model(read_config(folder).decoder)
    _write(folder, tensors=_tensors(_CONFIG), num_hidden_layers=4)
    with pytest.raises(UserError, match=r"missing: model\.layers\.3\.input_layernorm\.weight, .* and 1 more"):
        load_params(folder, Model(read_config(folder).decoder))
    _write(folder, tensors=_tensors(_CONFIG | {"num_hidden_layers": 4}))
    with pytest.raises(UserError, match=r"the model does not have the weights model\.layers\.3\.input_layernorm"):
        load_params(folder, layers_3)
    _write(folder, tensors=_tensors(_CONFIG), vocab_size=40)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is \[36, 16\], \[40, 16\] expected"):
        load_params(folder, Model(read_config(folder).decoder))


def test_non_finite_weights_are_refused_by_name(tmp_path):
    tensors = _tensors(_CONFIG)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = np.nan
    folder = _write(tmp_path / "hf", tensors=tensors)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight in .* non-finite"):
        load_params(folder, Model(read_config(folder).decoder))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(["the cat sat on the mat", "a dog ran to the house"] * 20, 130, path)
    return path


def _pretrained(tmp_path, tokenizer_file, **changes):
    folder = _write(tmp_path / "hf", vocab_size=130, **changes)
    (folder / "tokenizer.model").write_bytes(tokenizer_file.read_bytes())
    return folder


def load_pretrained(folder, max_length=0, compute_dtype="float32"):
    """(model, parameters, tokenizer) of a folder, checked as a run does."""
    config = read_config(folder, compute_dtype)
    check_length(folder, config, max_length)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(folder, config, tokenizer)
    model = Model(config.decoder, config.head)
    return model, load_params(folder, model), tokenizer


def test_a_whole_folder_is_loaded(tmp_path, tokenizer_file):
    folder = _pretrained(tmp_path, tokenizer_file)
    model, params, tokenizer = load_pretrained(folder, max_length=64, compute_dtype="bfloat16")
    assert model.config.compute_dtype == "bfloat16"
    np.testing.assert_array_equal(
        params["embedding"], load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert tokenizer.vocab_size == model.config.vocab == 130


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": [2, 130]}, "the tokenizer in .* has ids up to 130, but config.json says vocab_size 130; give the"),
        ({"max_position_embeddings": 32}, "model.max_length is 64, but .* at most 32 positions; lower it"),
    ],
)
def test_a_folder_with_inconsistent_parts_is_refused(tmp_path, tokenizer_file, changes, message):
    with pytest.raises(UserError, match=message):
        load_pretrained(_pretrained(tmp_path, tokenizer_file, **changes), max_length=64)


def test_a_tokenizer_can_be_smaller_than_the_embedding_but_not_larger(tmp_path, tokenizer_file):
    folder = _write(tmp_path / "hf", vocab_size=129)
    with pytest.raises(UserError, match="hf has no tokenizer: neither tokenizer.json nor tokenizer.model exists"):
        load_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(tokenizer_file.read_bytes())
    with pytest.raises(UserError, match="has ids up to 129, but config.json says vocab_size 129; give the tokenizer"):
        load_pretrained(folder)
    folder = _write(tmp_path / "padded", vocab_size=160)
    (folder / "tokenizer.model").write_bytes(tokenizer_file.read_bytes())
    model, _, tokenizer = load_pretrained(folder)
    assert (tokenizer.vocab_size, model.config.vocab) == (130, 160)


def test_an_eos_id_unknown_to_the_tokenizer_stops_sampling_as_well(tmp_path, tokenizer_file):
    folder = _pretrained(tmp_path, tokenizer_file, eos_token_id=[7, 2], bos_token_id=5)
    tokenizer = load_pretrained(folder)[2]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2, 7))


@pytest.fixture(scope="module")
def stories(real_data):
    folder = real_data / "stories260K"
    if not folder.is_dir():
        pytest.skip("the stories260K checkpoint is absent")
    return load_pretrained(folder / "hf", max_length=512), json.loads((folder / "golden_greedy.json").read_text())


def test_log_probs_of_a_real_checkpoint_equal_the_published_ones(stories):
    (model, params, _), golden = stories
    ids = jnp.asarray(golden["greedy_ids"], jnp.int32)[None]
    logits = (model.hidden(params, ids) @ model.unembedding(params))[0]
    np.testing.assert_allclose(logits[4, :16], golden["first_logits_last_prompt_pos"], atol=1e-4)
    logprobs = jax.nn.log_softmax(logits[:-1])[jnp.arange(ids.shape[1] - 1), ids[0, 1:]]
    np.testing.assert_allclose(logprobs, golden["token_logprobs"], atol=1e-4)


@pytest.mark.slow
def test_greedy_output_of_a_real_checkpoint_equals_the_published_one(stories):
    (model, params, tokenizer), golden = stories
    prompt, expected = golden["prompt_ids"], golden["greedy_ids"]
    assert [tokenizer.bos_id, *tokenizer.encode("Once upon a time")] == prompt
    sampling = Sampling(len(expected) - len(prompt), (tokenizer.eos_id,), temperature=0.0)
    engine = Engine(model, batch=2, max_length=256, bucket=8)
    response = respond(LocalSampler(engine, params), [prompt], jax.random.key(0), [0], sampling)[0]
    assert list(response.ids) == expected[len(prompt) :]
    assert response.logprob == pytest.approx(sum(golden["token_logprobs"][len(prompt) - 1 :]), abs=200 * 1e-5)
    assert tokenizer.decode(expected) == golden["text"]
