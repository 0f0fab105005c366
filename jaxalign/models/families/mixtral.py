"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from jaxalign.models.architecture import DecoderConfig, Experts
from jaxalign.models.families.base import Fields, Weight, activation, llama_weights, rope, sizes

_EXPERT = "block_sparse_moe.experts.{expert}."
_NAMES = ("block_sparse_moe.gate.weight", f"{_EXPERT}w1.weight", f"{_EXPERT}w3.weight", f"{_EXPERT}w2.weight")


def decoder(fields: Fields) -> dict[str, Any]:
    fields.only("router_jitter_noise", 0)
    window = fields.get("sliding_window")
    return sizes(fields, eps=1e-5, tied=False) | rope(fields, 1e6) | {
        "activation": activation(fields, "hidden_act", "silu"),
        "window": None if window is None else fields.integer("sliding_window"),
        "experts": Experts(fields.integer("num_local_experts", 8), fields.integer("num_experts_per_tok", 2)),
    }


def weights(c: DecoderConfig) -> tuple[Weight, ...]:
    return llama_weights(c, _NAMES)
