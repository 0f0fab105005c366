"""Llama 2, 3 and 3.1 on (arXiv 2307.09288, 2407.21783), and what is built alike."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Family, Fields, activation, llama_weights, rope, sizes


def _decoder(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    fields.only("sliding_window", None)
    return sizes(fields, eps=1e-6, tied=False) | rope(fields) | {
        "activation": activation(fields, "hidden_act", "silu"),
        "qkv_bias": bias, "out_bias": bias, "mlp_bias": fields.flag("mlp_bias", False),
    }  # fmt: skip


FAMILY = Family("llama", "LlamaForCausalLM", _decoder, llama_weights)
