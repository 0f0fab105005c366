"""A small run of stage ppo alone, from a model folder and a file of prompts."""

from __future__ import annotations

import pathlib

from tests.folders import write_model

REWARD = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "reward.py"


def write_inputs(root: pathlib.Path) -> pathlib.Path:
    """Write the model and the prompts to a folder, and return it."""
    write_model(root / "model")
    (root / "rl.txt").write_text("".join(f"What is {i} + {i}?\n" for i in range(16)))
    return root


def config(folder, placement=None, mesh=None, **fields):
    """The values of a run of stage ppo on the folder of `write_inputs`."""
    return {
        "stages": ("ppo",), "compile_cache": None, "mesh": mesh or {}, "placement": placement or {},
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 64},
        "data": {"source": "prompts_jsonl", "style": "hh", "rl": str(folder / "rl.txt"), "held_out_share": 0.0},
        "reward": {"source": "callable", "callable": f"{REWARD}:brief"}, "lora": {"rank": 2},
        "ppo": {"iterations": 3, "batch": 8, "minibatches": 2, "prompts": 16, "max_new_tokens": 8, "checkpoint_every": 1,
                "temperature": 2.0},
    } | fields
