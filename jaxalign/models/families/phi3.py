"""Phi 3 and 4 (arXiv 2404.14219, 2412.08905): Llama with fused weights, partial rotary positions and LongRoPE."""

from __future__ import annotations

from typing import Any

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.families.base import Fields, Weight, activation, llama_weights, rope, sizes

_PARTS = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
          "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def decoder(fields: Fields) -> dict[str, Any]:
    arguments = sizes(fields, eps=1e-5, tied=False, partial=True)
    for name in ("full_attn_mod", "interpolate_factor"):  # Phi 4 mini gives these fields.
        fields.only(name, 1)
    original = fields.integer("original_max_position_embeddings", 4096)
    turning = rope(fields, partial=True, original=original)
    share = fields.real("partial_rotary_factor", 1.0)
    share = turning.pop("partial", share)
    window = fields.get("sliding_window")
    return arguments | turning | {
        "activation": activation(fields, "hidden_act", "silu"), "rotary_dim": int(arguments["head_dim"] * share),
        "window": None if window is None else fields.integer("sliding_window"),
    }


def weights(c: DecoderConfig) -> tuple[Weight, ...]:
    found = []
    for weight in llama_weights(c):
        name = weight.stored.split(".")[-2]
        if name in _PARTS:  # It is stored as a part of a fused weight.
            fused, pick = _PARTS[name]
            found.append(weight._replace(stored=weight.stored.replace(name, fused), pick=pick))
        else:
            found.append(weight)
    return tuple(found)
