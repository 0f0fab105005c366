"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, sizes, windows


def qwen_windows(fields: Fields, layers: int) -> dict[str, Any]:
    """The window of the layers from max_window_layers on, if use_sliding_window is true."""
    used = fields.flag("use_sliding_window", False)
    window, first = fields.get("sliding_window", 4096), fields.get("max_window_layers", 28)
    return windows(fields, window if used else None, tuple(used and layer >= first for layer in range(layers)))


def decoder(fields: Fields) -> dict[str, Any]:
    arguments = sizes(fields, eps=1e-6, tied=False)
    fields.get("use_mrope")
    fields.only("use_mrope", False)
    return arguments | rope(fields) | qwen_windows(fields, arguments["layers"]) | {
        "activation": activation(fields, "hidden_act", "silu"), "qkv_bias": True,
    }
