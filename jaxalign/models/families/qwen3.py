"""Qwen 3 (arXiv 2505.09388): Llama with queries and keys normalised per head."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, sizes
from jaxalign.models.families.qwen2 import qwen_windows


def decoder(fields: Fields) -> dict[str, Any]:
    arguments, bias = sizes(fields, eps=1e-6, tied=False), fields.flag("attention_bias", False)
    arguments["head_dim"] = fields.integer("head_dim", 128)
    return arguments | rope(fields) | qwen_windows(fields, arguments["layers"]) | {
        "activation": activation(fields, "hidden_act", "silu"), "head_norm": True, "qkv_bias": bias, "out_bias": bias,
    }
