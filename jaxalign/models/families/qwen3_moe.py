"""Qwen 3 with a mixture of experts (arXiv 2505.09388) in every layer."""

from __future__ import annotations

from typing import Any

from jaxalign.models.architecture import DecoderConfig, Experts
from jaxalign.models.families.base import Fields, Weight, activation, llama_weights, rope, sizes

_EXPERT = "mlp.experts.{expert}."
_NAMES = ("mlp.gate.weight", f"{_EXPERT}gate_proj.weight", f"{_EXPERT}up_proj.weight", f"{_EXPERT}down_proj.weight")


def decoder(fields: Fields) -> dict[str, Any]:
    arguments, bias = sizes(fields, eps=1e-6, tied=False), fields.flag("attention_bias", False)
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [])
    fields.get("max_window_layers")
    used = fields.flag("use_sliding_window", False)
    window = fields.get("sliding_window", 4096)
    count = fields.integer("num_local_experts", fields.integer("num_experts", 128))  # The field's name depends on the version.
    return arguments | rope(fields) | {
        "activation": activation(fields, "hidden_act", "silu"), "head_norm": True, "qkv_bias": bias, "out_bias": bias,
        "mlp": fields.integer("moe_intermediate_size", 768), "window": window if used else None,
        "experts": Experts(count, fields.integer("num_experts_per_tok", 8), fields.flag("norm_topk_prob", False)),
    }


def weights(c: DecoderConfig) -> tuple[Weight, ...]:
    return llama_weights(c, _NAMES)
