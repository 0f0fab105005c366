"""Writes a Llama folder with a byte-level BPE tokenizer as a GGUF file, the format of llama.cpp."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}


def write_gguf(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Writes the model in `folder` (config.json, model.safetensors, tokenizer.json, tokenizer_config.json) to `path`."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, folder, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        writer.add_tensor(_name(name), _converted(name, weight.astype(np.float32), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer, folder: pathlib.Path, config: dict) -> None:
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    names = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # The pattern of GPT-2, which ByteLevel of `tokenizers` uses.
    writer.add_token_list(names)
    writer.add_token_types([gguf.TokenType.CONTROL if vocab[name] in special else gguf.TokenType.NORMAL for name in names])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(part)]}.{kind}"


def _converted(name: str, weight: np.ndarray, config: dict) -> np.ndarray:
    """GGUF stores the two halves of a rotated pair next to each other; Hugging Face stores them half a head apart."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2)).reshape(weight.shape)
