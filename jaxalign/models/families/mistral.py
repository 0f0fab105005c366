"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, sizes


def decoder(fields: Fields) -> dict[str, Any]:
    # If the field is absent, the window is that of the first Mistral; null means no window.
    window = fields.raw.get("sliding_window", 4096)
    limits = {} if window is None else {"window": fields.integer("sliding_window", 4096)}
    fields.get("sliding_window")
    return sizes(fields, eps=1e-6, tied=False) | rope(fields) | limits | {
        "activation": activation(fields, "hidden_act", "silu"),
    }
