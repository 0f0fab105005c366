"""The config of a run of all stages at tiny sizes on a mesh of eight devices."""

from __future__ import annotations

from jaxalign.config import Config, from_config_dict
from jaxalign.registry.stages import STAGES

SIZES = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24, "max_length": 32}
SHORT = {"max_new_tokens": 8, "batch": 8}
TINY = {
    "stages": [name for name in STAGES.names() if name != "report"], "model": SIZES, "world": {"vocab_size": 400},
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "feedback": {"max_reasoning_tokens": 8},
    "pretrain": {"row_length": 16}, "sft": {"row_length": 16}, "revise": SHORT, "compare": SHORT, "evaluate": SHORT,
    "preference": {"members": 1, "batch": 8, "max_length": 16}, "dpo": {"batch": 8, "max_length": 16},
    "best_of_n": SHORT | {"n": 2, "row_length": 16},
    "online_dpo": SHORT, "ppo": SHORT,
    "reward_distill": SHORT | {"batch": 16, "batch_pairs": 8, "kv_heads": 2},
}


def merged(first: dict, second: dict) -> dict:
    both = first | second
    return both | {name: merged(first[name], value) for name, value in second.items()
                   if isinstance(value, dict) and isinstance(first.get(name), dict)}


def config(**changes) -> Config:
    return from_config_dict(merged(TINY, changes))
