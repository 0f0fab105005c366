"""A run of all stages at their smallest sizes, and its files. The fixture `done` has a finished one."""

from __future__ import annotations

import hashlib
import json
import pathlib

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.tracking.timing import read_timing
from tests.few_programs import sample_with_few_programs

CONFIG = {
    "compile_cache": None,
    "tracking": {"system_seconds": 0, "live_report_seconds": 0},  # Its files would depend on the time that the run takes.
    "world": {"tokens": 12_000, "topics": 12, "held_out_topics": 4, "vocab_size": 400},
    "model": {"layers": 1, "embed": 32, "mlp": 64, "heads": 2, "kv_heads": 2, "head_dim": 8, "max_length": 192},
    "pretrain": {"steps": 60, "batch_rows": 8, "row_length": 64, "checkpoint_every": 25,
                 "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5}},
    "revise": {"red_team_prompts": 16, "helpful_prompts": 8, "rounds": 2, "batch": 16, "max_new_tokens": 24},
    "sft": {"batch_rows": 4, "row_length": 64, "epochs": 2},
    "feedback": {"max_reasoning_tokens": 24, "undecided": "half"},
    "compare": {"prompts": 24, "batch": 16, "max_new_tokens": 24},
    "preference": {"members": 1, "batch": 8, "epochs": 2, "max_length": 192, "held_out_share": 0.2},
    "ppo": {"iterations": 3, "kl_coef": 0.05, "batch": 8, "minibatches": 2, "epochs": 2, "prompts": 16, "max_new_tokens": 24,
            "checkpoint_every": 2},
    "evaluate": {"prompts": 16, "batch": 16, "win_rate_prompts": 8, "max_new_tokens": 24, "examples": 2},
}


def run(workdir, **changes):
    """Run the stages, with few sampling programs."""
    with pytest.MonkeyPatch.context() as patch:
        sample_with_few_programs(patch)
        pipeline.run(from_config_dict(CONFIG | changes), workdir)


def read(path: pathlib.Path):
    return json.loads(path.read_text(encoding="utf-8"))


def rows(workdir, stage):
    return [json.loads(line) for path in sorted((workdir / stage).glob("rows-*.jsonl")) for line in open(path)]


def fingerprints(workdir):
    return {path.relative_to(workdir): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(workdir.rglob("*")) if path.is_file()}


def phases_with_operations(folder: pathlib.Path) -> set[str]:
    """Return the phases of a stage with operations, and check that they have tokens as well."""
    timing = read_timing(folder / "timing.jsonl")
    assert all(total["tokens"] for total in timing.values() if total["flops"])
    return {name for name, total in timing.items() if total["flops"]}
