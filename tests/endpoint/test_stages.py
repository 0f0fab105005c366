"""Stages whose judge is behind a real server: every answer is asked once, and a run is replayed without the server."""

from __future__ import annotations

import json

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.errors import UserError

SIZES = {"batch": 8, "max_new_tokens": 12}
STAGES = ("revise", "sft", "compare", "evaluate", "report")


def config(folder, url, **endpoint):
    """A run with the model of the server as the policy. Its answers are noise, so nearly all rows are kept."""
    return from_config_dict({
        "stages": STAGES, "compile_cache": None,
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "red_team": str(folder / "prompts.jsonl"), "held_out_share": 0.2},
        "feedback": {"judge": "endpoint", "max_outside_mass": 1.0, "undecided": "half", "principles_per_comparison": 2},
        "endpoint": {"url": (url,), "concurrency": 4, "votes": 2} | endpoint,
        "revise": SIZES | {"rounds": 1, "red_team_prompts": 8},
        "sft": {"batch_rows": 2, "row_length": 128, "keep": ("unchanged", "grown", "cut_off"), "required_rows": 1,
                "min_share": 0.0, "min_rows": 1},
        "compare": SIZES | {"prompts": 16, "samples": 2},
        "evaluate": SIZES | {"prompts": 4, "win_rate_prompts": 4},
    })


def answers(workdir):
    """The rows of all stages that ask the judge."""
    files = sorted(path for stage in STAGES for path in (workdir / stage).glob("*rows-*.jsonl"))
    assert files
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def folder(tiny_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    (folder / "model").symlink_to(tiny_server.model)
    questions = [f"Is answer {i} better, A or B?" for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    return folder


@pytest.fixture(scope="module")
def finished(tiny_server, folder):
    pipeline.run(config(folder, tiny_server.server.url), folder / "run")
    return folder / "run"


def test_rows_name_the_way_in_which_a_verdict_was_read(finished):
    rows = [json.loads(line) for path in sorted((finished / "compare").glob("rows-*.jsonl")) for line in open(path)]
    verdicts = [row for row in rows if row["response_a"] != row["response_b"] and row.get("outcome") != "missing_answer"]
    assert len(verdicts) > 4
    assert all({"top_logprobs", "votes"} & set(row.get("notes", ())) for row in verdicts)


def test_an_answer_that_is_not_stored_ends_an_offline_run(folder, finished):
    offline = config(folder, "http://127.0.0.1:9", offline=True, cache=str(finished / "endpoint.sqlite"))
    with pytest.raises(UserError, match="not stored"):  # What another server can do is not known.
        pipeline.run(offline, folder / "elsewhere")


def test_a_replay_asks_nothing_and_writes_equal_rows(folder, finished, tiny_server):
    offline = config(folder, tiny_server.server.url, offline=True, cache=str(finished / "endpoint.sqlite"))
    pipeline.run(offline, folder / "replay")
    assert answers(folder / "replay") == answers(finished)
