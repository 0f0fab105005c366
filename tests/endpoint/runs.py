"""Runs whose judge is the server of `tiny_server`: their inputs, config and rows."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxalign.config import from_config_dict

STAGES = ("revise", "sft", "compare", "evaluate", "report")
_SIZES = {"batch": 8, "max_new_tokens": 12}


def write_inputs(folder: pathlib.Path, model: pathlib.Path) -> None:
    """Writes the prompts of `values`, and a link to its model."""
    (folder / "model").symlink_to(model)
    questions = [f"Is answer {i} better, A or B?" for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))


def values(folder: pathlib.Path, url: str, stages: Sequence[str] = STAGES, **endpoint: Any) -> dict[str, Any]:
    """The config of a run with the model of the server as the policy. Its answers are noise, so nearly all rows are kept."""
    sections = {
        "revise": _SIZES | {"rounds": 1, "red_team_prompts": 8},
        "sft": {"batch_rows": 2, "row_length": 128, "keep": ("unchanged", "grown", "cut_off"), "required_rows": 1,
                "min_share": 0.0, "min_rows": 1},
        "compare": _SIZES | {"prompts": 16, "samples": 2},
        "evaluate": _SIZES | {"prompts": 4, "win_rate_prompts": 4},
    }
    return {
        "stages": tuple(stages), "compile_cache": None,
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "red_team": str(folder / "prompts.jsonl"), "held_out_share": 0.2},
        "feedback": {"judge": "endpoint", "max_outside_mass": 1.0, "undecided": "half", "principles_per_comparison": 2},
        "endpoint": {"url": (url,), "concurrency": 4, "votes": 2} | endpoint,
        **{name: section for name, section in sections.items() if name in stages},
    }


def rows(workdir: pathlib.Path) -> dict[str, bytes]:
    """The files of rows of all stages that ask the judge."""
    files = sorted(path for stage in STAGES for path in (workdir / stage).glob("*rows-*.jsonl"))
    assert files
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


def config(folder, url, **endpoint):
    return from_config_dict(values(folder, url, **endpoint))
