"""Gemma 1 (arXiv 2403.08295): scaled embeddings, norms with scale 1 + w, GELU."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, sizes


def gemma_sizes(fields: Fields) -> dict[str, Any]:
    """The arguments common to all Gemma models."""
    arguments, bias = sizes(fields, eps=1e-6, tied=True), fields.flag("attention_bias", False)
    fields.only("use_bidirectional_attention", False)
    arguments["head_dim"] = fields.integer("head_dim", 256)
    return arguments | {"norm": "rms_plus_one", "scale_embeddings": True, "qkv_bias": bias, "out_bias": bias}


def decoder(fields: Fields) -> dict[str, Any]:
    # The first releases say "gelu" but mean its tanh approximation; hidden_activation takes precedence if given.
    chosen = activation(fields, "hidden_activation", fields.get("hidden_act", "gelu_pytorch_tanh"))
    chosen = "gelu_tanh" if chosen == "gelu" else chosen
    return gemma_sizes(fields) | rope(fields) | {"activation": chosen}
