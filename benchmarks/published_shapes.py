"""Shapes of published models, as their config.json has them: enough for a plan, which needs no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.families.base import Fields
from jaxalign.models.families.registry import FAMILIES

_LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": _LLAMA3 | {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True, "rope_scaling": _LLAMA3["rope_scaling"] | {"factor": 32.0},
    },
    "Llama-3.1-8B": _LLAMA3 | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
    },
    "Llama-3.1-70B": _LLAMA3 | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}  # fmt: skip


def decoder(name: str, **changes) -> DecoderConfig:
    """The decoder of that model."""
    fields = Fields(Path(name), SHAPES[name])
    return DecoderConfig(**FAMILIES[SHAPES[name]["model_type"]].decoder(fields), **changes)
