"""Granite 3 (https://hf.co/ibm-granite): Llama with factors of embeddings, attention scores, residual stream and logits."""

from __future__ import annotations

from typing import Any

from jaxalign.models.families import llama
from jaxalign.models.families.base import Fields, rope


def decoder(fields: Fields) -> dict[str, Any]:
    return llama.biased_sizes(fields, tied=False) | rope(fields) | {
        "embedding_factor": fields.real("embedding_multiplier", 1.0),
        "attention_scale": fields.real("attention_multiplier", 1.0),
        "residual_factor": fields.real("residual_multiplier", 1.0), "logit_factor": 1 / fields.real("logits_scaling", 1.0),
    }
