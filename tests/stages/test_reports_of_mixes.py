"""The report of runs that train on a file of pairs with few stages: every link leads to a section with content."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from tests.folders import write_model
from tests.tracking.pages import check_links, render_page

JUDGE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory, few_sampling_programs):
    """A folder with a tiny model and a file of pairs."""
    root = tmp_path_factory.mktemp("mixes")
    write_model(root / "model")
    pairs = [{"prompt": f"the cat sat {i} times, why?", "chosen": f"it sat {i} times", "rejected": "no"} for i in range(24)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "links"), [
    (("sft",), {"losses", "time", "config"}),
    (("preference",), {"preference", "time", "config"}),
    (("dpo",), {"changes", "dpo", "time", "config"}),
    (("sft", "dpo", "evaluate"), {"changes", "behaviour", "answers", "dpo", "losses", "time", "config"}),
], ids=["sft", "preference", "dpo", "sft and dpo"])
def test_every_link_leads_to_a_section_with_content(files, tmp_path, stages, links):
    pipeline.run(from_config_dict({
        "stages": (*stages, "report"), "compile_cache": None, "tracking": {"system_seconds": 0, "live_report_seconds": 0},
        "model": {"source": "huggingface", "path": str(files / "model"), "max_length": 64},
        "data": {"source": "preferences_jsonl", "train": str(files / "pairs.jsonl"), "held_out_share": 0.2},
        "sft": {"batch_rows": 2, "row_length": 64}, "preference": {"members": 1, "batch": 4, "max_length": 64},
        "dpo": {"batch": 4, "max_length": 64, "epochs": 5},
        "evaluate": {"batch": 4, "max_new_tokens": 4, "win_rate_prompts": 0},
    }), tmp_path)
    assert set(check_links(tmp_path / "report.html")) == links
    for stage in stages:
        data = json.loads((tmp_path / stage / "summary.json").read_text())["data"]
        assert [file["rows"] for file in data.get("files", [data])] == [24], stage


@pytest.mark.slow
def test_dropped_rows_of_a_file_of_which_only_prompts_are_used_are_on_the_page_once(files, tmp_path):
    pairs = [{"prompt": f"why {i}", "chosen": "yes", "rejected": "yes" if i < 9 else "no"} for i in range(15)]
    path = tmp_path / "mostly.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sizes = {"batch": 4, "max_new_tokens": 4}
    pipeline.run(from_config_dict({
        "stages": ("online_dpo", "ppo", "evaluate", "report"), "compile_cache": None,
        "tracking": {"system_seconds": 0, "live_report_seconds": 0},
        "model": {"source": "huggingface", "path": str(files / "model"), "max_length": 64},
        "data": {"source": "preferences_jsonl", "train": str(path), "held_out_share": 0.2},
        "feedback": {"judge": f"{JUDGE}:Brevity"},
        "reward": {"source": "callable", "callable": f"{__file__}:length"},
        "online_dpo": sizes | {"iterations": 1, "minibatches": 1},
        "ppo": sizes | {"iterations": 1, "minibatches": 1, "advantages": "rloo", "group_size": 2,
                        "checks": {"step_zero": False}},
        "evaluate": sizes | {"win_rate_prompts": 0},
    }), tmp_path / "run")
    for stage in ("online_dpo", "ppo", "evaluate"):
        (report,) = json.loads((tmp_path / "run" / stage / "summary.json").read_text())["data"]["files"]
        assert (report["rows"], report["pairs"]) == (15, 6), stage
    shown = render_page(tmp_path / "run")[1].text("lead")
    assert shown.count("mostly.jsonl: 15 rows, 6 pairs kept.") == shown.count("9 (60.0%) with two equal answers, dropped") == 1
    assert shown.count("Warning: only 6 of 15 rows of ") == 1


def length(prompts, responses, **columns):
    """A reward."""
    return [float(len(response)) for response in responses]
