"""Llama 2, 3, 3.1 and later (arXiv 2307.09288, 2407.21783), and other models with the same architecture."""

from __future__ import annotations

from typing import Any

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.families.base import Fields, activation, rope, sizes


def decoder(fields: Fields) -> dict[str, Any]:
    fields.only("sliding_window", None)
    return biased_sizes(fields, tied=False) | rope(fields)


def biased_sizes(fields: Fields, tied: bool) -> dict[str, Any]:
    """The arguments common to Llama and the families that add to it; `tied` is the family's default."""
    bias = fields.flag("attention_bias", False)
    return sizes(fields, eps=1e-6, tied=tied) | {
        "activation": activation(fields, "hidden_act", "silu"),
        "qkv_bias": bias, "out_bias": bias, "mlp_bias": fields.flag("mlp_bias", False),
    }


def config_json(decoder: DecoderConfig, max_positions: int) -> dict[str, Any]:
    """The fields of config.json for a decoder built here that fits this family: plain RMSNorm, SiLU, full rotary positions, no
    biases. The caller adds the special tokens' ids."""
    return {
        "model_type": "llama", "vocab_size": decoder.vocab, "num_hidden_layers": decoder.layers, "hidden_size": decoder.embed,
        "num_attention_heads": decoder.heads, "num_key_value_heads": decoder.kv_heads, "head_dim": decoder.head_dim,
        "intermediate_size": decoder.mlp, "hidden_act": decoder.activation, "rope_theta": decoder.rope_base,
        "rms_norm_eps": decoder.norm_eps, "tie_word_embeddings": decoder.tie_embeddings,
        "max_position_embeddings": max_positions, "torch_dtype": "float32",
    }
