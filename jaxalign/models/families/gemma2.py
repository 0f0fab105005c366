"""Gemma 2 (arXiv 2408.00118): windows in every other layer, soft caps, norms before and after attention and MLP."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families.base import Fields, activation, rope, windows
from jaxalign.models.families.gemma import gemma_sizes


def capped_sizes(fields: Fields, attention_cap: float | None, final_cap: float | None) -> dict[str, Any]:
    """The arguments common to Gemma 2 and 3. The caps are the defaults if config.json lacks the field; null means no cap."""
    caps = {"attn_logit_softcapping": attention_cap, "final_logit_softcapping": final_cap}
    attention, final = (fields.optional_real(n) if n in fields.raw else usual for n, usual in caps.items())
    return gemma_sizes(fields) | {
        "activation": activation(fields, "hidden_activation", "gelu_pytorch_tanh"), "sandwich_norms": True,
        "attention_scale": fields.real("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": attention, "final_softcap": final,
    }


def decoder(fields: Fields) -> dict[str, Any]:
    arguments = capped_sizes(fields, 50.0, 30.0)
    fields.get("hidden_act")
    local = tuple(layer % 2 == 0 for layer in range(arguments["layers"]))
    return arguments | rope(fields) | windows(fields, fields.integer("sliding_window", 4096), local)
