"""Every family against `transformers`: logits, cached decoding past the window, gradients, and exports.

Models are tiny and random, with awkward sizes; there are no golden files. Needs the extra `parity`.
"""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.export import export
from jaxalign.models.checkpoints.huggingface import load_params, read_config
from jaxalign.models.model import Model
from jaxalign.records import PackedBatch
from jaxalign.steps.lm_step import lm_loss
from tests import tiny
from tests.rings import ring_of

pytestmark = pytest.mark.parity

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 2e-5  # of the largest logit, in float32
_COMMON = {
    "vocab_size": 53, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "attn_implementation": "eager", "experts_implementation": "eager", "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
_ODD = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 35, "vocab_size": 61}
_GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 18, "intermediate_size": 22}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 200.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.3], "long_factor": [2.0, 7.0]}
_LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}

CASES = {
    "llama": ("Llama", {**_GROUPED, "head_dim": 10, "tie_word_embeddings": True}),
    "llama-odd": ("Llama", {**_ODD, "head_dim": 6, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LINEAR}),
    "llama-3.1": ("Llama", {**_GROUPED, "head_dim": 8, "rope_parameters": _LLAMA3, "max_position_embeddings": 128}),
    "llama-yarn": ("Llama", {**_GROUPED, "head_dim": 12, "rope_parameters": _YARN | {
        "beta_fast": 9.0, "beta_slow": 0.6, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.4}}),
    "llama-dynamic": ("Llama", {**_GROUPED, "head_dim": 6, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    "phi3": ("Phi3", {**_GROUPED, "hidden_size": 24, "num_key_value_heads": 2, "sliding_window": 5, "bos_token_id": 1}),
    "phi3-long": ("Phi3", {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 32,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "rope_parameters": _LONGROPE | {
            "partial_rotary_factor": 0.5}}),
    "olmo2": ("Olmo2", {**_GROUPED, "hidden_size": 24}),
    "olmo2-bias": ("Olmo2", {"num_attention_heads": 5, "num_key_value_heads": 5, "attention_bias": True,
                             "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {**_GROUPED, "hidden_size": 24, "num_hidden_layers": 4, "sliding_window": 4, "rope_parameters": {
        "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}}),
    "smollm3": ("SmolLM3", {**_GROUPED, "hidden_size": 24, "num_hidden_layers": 4}),
    "smollm3-window": ("SmolLM3", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "granite": ("Granite", {**_GROUPED, "hidden_size": 24, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                            "residual_multiplier": 0.6, "logits_scaling": 7.0}),
    "granite-tied": ("Granite", {"num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
                                 "tie_word_embeddings": True, "logits_scaling": 4.0, "attention_multiplier": 0.5}),
    "mistral": ("Mistral", {**_GROUPED, "head_dim": 4, "sliding_window": 5}),
    "mistral-wide": ("Mistral", {**_ODD, "head_dim": 8, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"num_attention_heads": 10, "num_key_value_heads": 5, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2, "use_sliding_window": True,
                               "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**_ODD, "num_key_value_heads": 1, "head_dim": 6, "rope_parameters": _YARN | {"attention_factor": 1.7}}),
    "qwen3-bias": ("Qwen3", {**_GROUPED, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {**_GROUPED, "head_dim": 8}),
    "gemma-untied": ("Gemma", {**_ODD, "num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {**_GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 11,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-odd": ("Gemma2", {**_ODD, "head_dim": 6, "sliding_window": 6, "attn_logit_softcapping": None,
                              "final_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", {**_GROUPED, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 4,
                              "query_pre_attn_scalar": 9}),
    "gemma3-scaled": ("Gemma3Text", {
        **_ODD, "head_dim": 6, "sliding_window": 3, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    }),
    "neox": ("GPTNeoX", {"num_attention_heads": 5, "hidden_size": 40, "rotary_pct": 0.5}),
    "neox-serial": ("GPTNeoX", {"num_attention_heads": 3, "hidden_size": 36, "rotary_pct": 1.0, "attention_bias": False,
                                "use_parallel_residual": False, "hidden_act": "gelu_new", "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**_GROUPED, "head_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {**_ODD, "head_dim": 4, "num_local_experts": 3, "num_experts_per_tok": 3,
                                   "sliding_window": 4}),
    "qwen3-moe": ("Qwen3Moe", {**_GROUPED, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 10, "norm_topk_prob": True}),
    "qwen3-moe-plain": ("Qwen3Moe", {**_ODD, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 1,
                                     "moe_intermediate_size": 6, "norm_topk_prob": False, "tie_word_embeddings": True}),
}


def _reference(name: str, seed: int = 0):
    """A random model of `transformers` without weights at special values such as 0 and 1."""
    kind, changes = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**_COMMON | changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """Return (reference, folder it is saved in, model, params)."""
    reference = _reference(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    model = Model(read_config(folder).decoder)
    return reference, folder, model, load_params(folder, model)


def _ragged(vocab: int):
    """Tokens [4, 11] and lengths, right-padded. Torch gives the pad token's embedding no gradient, so no token is the pad
    token."""
    rng = np.random.default_rng(0)
    length = np.array([11, 3, 8, 1])
    tokens = rng.integers(1, vocab, (4, 11))
    return np.where(np.arange(11)[None] < length[:, None], tokens, 0).astype(np.int32), length


def _torch_logits(reference, tokens, mask=None):
    with torch.no_grad():
        given = None if mask is None else torch.tensor(mask)
        return reference(torch.tensor(tokens, dtype=torch.long), attention_mask=given).logits.numpy()


def _close(found, expected):
    error = float(np.abs(np.asarray(found) - expected).max())
    assert error <= TOLERANCE * float(np.abs(expected).max())


def test_logits_of_a_ragged_batch_and_cached_decoding_past_the_window(pair):
    """Prompts of different lengths, then single tokens from the cache: the logits equal those of the whole text."""
    reference, _, model, params = pair
    tokens, length = _ragged(model.config.vocab)
    P, N = tokens.shape[1], 6
    mask = np.arange(P)[None] < length[:, None]
    expected_prompts = _torch_logits(reference, tokens, mask.astype(np.int64))
    following = np.random.default_rng(1).integers(0, model.config.vocab, (len(tokens), N)).astype(np.int32)
    texts = [np.concatenate([row[:n], after])[None] for row, n, after in zip(tokens, length, following, strict=True)]
    expected = [_torch_logits(reference, text)[0, -N:] for text in texts]

    @jax.jit
    def decode(params, tokens, following):  # One program: several would cost more to compile.
        def step(cache, t):
            hidden, cache = model.decode(params, following[:, t], length.astype(np.int32) + t, cache, P + t)
            return cache, model.logits(params, hidden)

        hidden, cache = model.prefill(params, tokens)
        cache = ring_of(model, cache, length, P + N, P)
        return model.logits(params, hidden), jax.lax.scan(step, cache, np.arange(N, dtype=np.int32))[1]

    prompts, found = jax.tree.map(np.asarray, decode(params, tokens, following))
    _close(prompts[mask], expected_prompts[mask])
    for t in range(N):
        for row in range(len(tokens)):
            _close(found[t][row], expected[row][t])


@pytest.mark.variants(6)
def test_gradients_of_the_sft_loss(pair, tmp_path):
    """Torch's gradients are saved as if they were weights, so that they pass through the same names and layouts."""
    reference, _, model, params = pair
    tokens, length = _ragged(model.config.vocab)
    labels = np.where(np.arange(11)[None] < length[:, None], tokens, -100)
    mask = (labels >= 0).astype(np.int64)
    reference.zero_grad()
    loss = reference(torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(mask),
                     labels=torch.tensor(labels, dtype=torch.long)).loss
    loss.backward()
    kept = {name: weight.detach().clone() for name, weight in reference.named_parameters()}
    with torch.no_grad():
        for weight in reference.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    try:
        reference.save_pretrained(tmp_path)
    finally:
        with torch.no_grad():
            for name, weight in reference.named_parameters():
                weight.copy_(kept[name])
    expected = load_params(tmp_path, model)
    batch = PackedBatch(
        tokens, mask.astype(np.int32), np.broadcast_to(np.arange(11, dtype=np.int32), tokens.shape),
        mask.astype(np.float32),
    )
    found_loss, found = jax.jit(jax.value_and_grad(lambda p: lm_loss(model, p, batch, mask[:, 1:].sum())[0]))(params)
    assert float(found_loss) == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        other = expected
        for part in path:
            other = other[part.key]
        leaf, other = np.asarray(leaf), np.asarray(other)  # Operations of JAX would be compiled for every shape.
        assert np.abs(leaf - other).max() <= TOLERANCE * max(np.abs(other).max(), 1e-2), jax.tree_util.keystr(path)


def test_an_exported_model_is_the_same_model_in_transformers(pair, tmp_path):
    reference, folder, model, params = pair
    config = read_config(folder)
    export(tmp_path / "out", model, params, config=config.raw, source=folder)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again, info = type(reference).from_pretrained(tmp_path / "out", **eager, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, weight in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    tokens, _ = _ragged(model.config.vocab)
    np.testing.assert_array_equal(_torch_logits(again, tokens), _torch_logits(reference, tokens))


_WRAPPERS = {
    "gemma3": ("Gemma3", "gemma3", "siglip_vision_model"), "gemma3-untied": ("Gemma3", "gemma3", "siglip_vision_model"),
    "mistral3": ("Mistral3", "mistral", "pixtral"), "mistral3-tied": ("Mistral3", "mistral-wide", "pixtral"),
    "llava": ("Llava", "llama-odd", "clip_vision_model"), "llava-qwen": ("LlavaNext", "qwen2", "clip_vision_model"),
}


@pytest.mark.parametrize(
    ("name", "old_names"), [*((name, False) for name in _WRAPPERS), ("gemma3", True), ("mistral3-tied", True), ("llava", True)]
)
def test_the_text_model_of_a_multimodal_model(name, old_names, tmp_path, caplog):
    """old_names: the names of the released files, language_model.model.*, which `save_pretrained` also writes."""
    kind, case, vision = _WRAPPERS[name]
    text_kind, changes = CASES[case]
    tied = {"tie_word_embeddings": False} if name == "gemma3-untied" else {}
    text = getattr(transformers, f"{text_kind}Config")(**_COMMON | changes | tied)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
             "patch_size": 4, "head_dim": 8}
    sizes |= {"projection_dim": 8} if vision == "clip_vision_model" else {}
    outer = {"tie_word_embeddings": text.tie_word_embeddings}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=transformers.AutoConfig.for_model(vision, **sizes), **outer, image_token_index=50,
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    reference.save_pretrained(tmp_path / "whole", save_original_format=old_names)
    found = read_config(tmp_path / "whole")
    model = Model(found.decoder)
    params = load_params(tmp_path / "whole", model)
    assert [record.message for record in caplog.records if "only its text model is loaded" in record.message]
    tokens = np.random.default_rng(0).integers(1, 49, (2, 9)).astype(np.int32)
    expected = _torch_logits(reference, tokens)
    _close(tiny.all_logits(model, params, tokens), expected)
    export(tmp_path / "text", model, params, config=found.raw)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", attn_implementation="eager")
    assert type(again).__name__ == found.family.architecture
    _close(_torch_logits(again, tokens), expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-plain"])
def test_the_load_balance_of_experts_equals_that_of_transformers(name, tmp_path):
    reference = _reference(name)
    reference.save_pretrained(tmp_path)
    model = Model(read_config(tmp_path).decoder)
    params = load_params(tmp_path, model)
    tokens, length = _ragged(model.config.vocab)
    mask = (np.arange(11)[None] < length[:, None]).astype(np.int32)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(mask).long(),
                             output_router_logits=True).aux_loss.item()
    _, found = model.hidden_and_balance(params, tokens, None, mask)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "rope_scaling", {"rope_type": "proportional", "factor": 4.0}),
        ("phi3", "full_attn_mod", 2),
        ("olmo2", "clip_qkv", 8.0),
        ("smollm3", "no_rope_layers", [2, 1, 1, 1]),
        ("granite", "logits_scaling", "8"),
        ("llama", "hidden_act", "mish"),
        ("llama", "attention_dropout", 1.5),
        ("llama", "embedding_multiplier", 12.0),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma2", "layer_types", ["chunked_attention"] * 2),
        ("qwen3-moe", "mlp_only_layers", [0]),
        ("qwen3-moe", "decoder_sparse_step", 2),
        ("mixtral", "router_jitter_noise", 0.2),
        ("neox", "quantization_config", {"bits": 4}),
        ("qwen2", "model_type", "qwen2_vl"),
    ],
)
def test_unsupported_features_are_refused_by_name(family, field, value, tmp_path):
    _reference(family).config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    name = "rope_type" if field == "rope_scaling" else field
    with pytest.raises(UserError, match=name):
        read_config(tmp_path)


def test_a_dropout_rate_is_read_with_a_warning(tmp_path, caplog):
    """Granite 3.0 has an attention_dropout of 0.1, which affects only its training."""
    _reference("llama").config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"attention_dropout": 0.1}))
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        read_config(tmp_path)
    assert "attention_dropout is 0.1; dropout is not used here" in caplog.text
