"""The prompts of one window of large data: the same from every format, spread over the data, trained on or held out."""

from __future__ import annotations

import json
import pathlib
import time

import pytest

from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.sources.window_rows import is_held_out
from jaxalign.records import Message, Prompt
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from tests import processes, table_files
from tests.feedback.fakes import WordTokenizer
from tests.folders import write_model

pytest.importorskip("pyarrow")

JUDGE = pathlib.Path(__file__).parents[1] / "extending" / "plugins" / "judge.py"
RED = [{"ask": f"red {i}?"} for i in range(100)]
GOOD = [{"ask": f"good {i}?"} for i in range(60)]
PURPOSES = ("red_team", "helpful", "rl", "compare", "evaluate")


def context(tmp_path, stage="revise", **data):
    model = {"source": "huggingface", "path": "none"}
    data = {"source": "prompts_jsonl", "held_out_share": 0.2, "style": "hh"} | data
    config = from_config_dict({"stages": (stage,), "model": model, "data": data})
    return StageContext(resolve_auto(config), tmp_path, tmp_path / stage, False)


def read(tmp_path, form, **data):
    """The prompts of every purpose."""
    red, good = (table_files.write_form(tmp_path / form, form, rows, name) for rows, name in ((RED, "red"), (GOOD, "good")))
    made = context(tmp_path, red_team=str(red), helpful=str(good), columns=("prompt=ask",), **data)
    sets = sources.prompt_sets(made, WordTokenizer())
    return [[(prompt.id, prompt.messages[0].content) for prompt in sets.of(purpose)] for purpose in PURPOSES]


@pytest.mark.parametrize("form", ("folder", "saved", "tfds"))
def test_the_prompts_of_a_window_are_those_of_json_lines(tmp_path, monkeypatch, form):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    assert read(tmp_path, form, window=32) == read(tmp_path, "jsonl", window=32)


def test_a_window_reads_only_some_rows_of_each_file_from_all_parts_of_it(tmp_path, capsys):
    red, good, rl, compare, held_out = read(tmp_path, "jsonl", window=32)
    texts = [text for part in (red, good, held_out) for _, text in part]
    assert len(texts) == len(set(texts)) == 64 and len(held_out) == 13  # Two windows of 32, and 20% of their dialogues.
    numbers = [int(text[4:-1]) for text in texts if text.startswith("red")]
    assert min(numbers) < 25 and max(numbers) >= 75
    assert rl == compare and sorted(rl) == sorted(red + good)
    assert "red.jsonl: 32 of 100 rows read, 32 prompts kept" in capsys.readouterr().out


def test_the_report_on_windows_gives_the_reason_of_the_first_broken_row(tmp_path, capsys):
    pairs = [{"prompt": f"why {i}?", "chosen": "yes", "rejected": "no"} for i in range(29)]
    path = table_files.write_jsonl(tmp_path / "pairs.jsonl", [*pairs, {**pairs[0], "weight": -1}, {}])
    made = context(tmp_path, stage="evaluate", source="preferences_jsonl", train=str(path), window=32, max_bad_share=0.1)
    sources.prompt_sets(made, WordTokenizer())
    assert ("2 broken; dropped (lines 30, 31); line 30: weight is '-1'; a number of at least 0 is expected"
            in capsys.readouterr().out)


def test_a_window_of_all_rows_gives_the_prompts_of_a_run_without_windows(tmp_path):
    assert read(tmp_path, "jsonl", window=100) == read(tmp_path, "jsonl")


def test_prompts_in_text_files_are_read_in_windows(tmp_path):
    (tmp_path / "red.txt").write_text("".join(f"red {i}?\n" for i in range(100)))
    (tmp_path / "good.csv").write_text("prompt\n" + "".join(f"good {i}?\n" for i in range(60)))
    data = {"red_team": str(tmp_path / "red.txt"), "helpful": str(tmp_path / "good.csv"), "window": 32}
    sets = sources.prompt_sets(context(tmp_path, **data), WordTokenizer())
    expected = read(tmp_path, "jsonl", window=32)
    assert [[prompt.messages[0].content for prompt in sets.of(purpose)] for purpose in PURPOSES] == [
        [text for _, text in part] for part in expected
    ]


def test_the_prompts_of_pairs_that_are_evaluated_are_those_that_no_window_trains_on(tmp_path):
    pairs = [{"prompt": f"the cat {i % 50} sat", "chosen": f"yes {i}", "rejected": "no"} for i in range(90)]
    path = table_files.write_jsonl(tmp_path / "rows.jsonl", pairs)
    made = context(tmp_path, "ppo", source="preferences_jsonl", train=str(path), window=64)
    sets = sources.prompt_sets(made, WordTokenizer())
    assert len(sets.evaluate) + len(sets.rl) == len({prompt.messages for prompt in (*sets.evaluate, *sets.rl)}) > 30
    for held_out, part in ((True, sets.evaluate), (False, sets.rl)):
        assert part and all(is_held_out(Prompt("", (Message("user", prompt.messages[0].content),), ""), 0.2, 0) == held_out
                            for prompt in part)


def test_a_stage_that_asks_for_more_prompts_than_the_window_has_says_so(tmp_path, capsys):
    path = table_files.write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"red {i}?"} for i in range(100)])
    made = context(tmp_path, "evaluate", rl=str(path), window=32)
    assert len(sources.prompts(made, WordTokenizer(), "rl", 50, 8)) == 26
    assert ("[evaluate] warning: 26 rl prompts are used, not the 50 of the config, since config.data.window is 32; raise it"
            in capsys.readouterr().out)


# With few sampling programs, as this process, with which it is compared.
RUN = """
import json, sys
from jaxalign import pipeline
from jaxalign.config import from_config_dict
from jaxalign.rollout import layouts
layouts.SHARES, layouts.SMALLER = (1,), 1
pipeline.run(from_config_dict(json.loads(sys.argv[1])), sys.argv[2])
"""


def cai(folder, form):
    """The config of the stages of Constitutional AI that read prompts, on the data of a format."""
    red, good = table_files.write_form(folder, form, RED, "red"), table_files.write_form(folder, form, GOOD, "good")
    sizes = {"batch": 16, "max_new_tokens": 48}
    return {
        "stages": ("revise", "sft", "compare", "evaluate"), "compile_cache": str(folder / "cache"),
        "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "style": "chat", "red_team": str(red), "helpful": str(good),
                 "columns": ("prompt=ask",), "held_out_share": 0.2, "window": 32},
        "feedback": {"judge": f"{JUDGE}:Brevity"},
        "revise": sizes | {"rounds": 1, "temperature": 3.0, "max_new_tokens": 64},  # Hot enough that some answers end.
        "sft": {"batch_rows": 2, "row_length": 128, "required_rows": 2, "required_share": 0.0},
        "compare": sizes | {"prompts": 24},
        "evaluate": sizes | {"win_rate_prompts": 4, "max_new_tokens": 8, "prompts": 8},
    }


@pytest.mark.slow
@pytest.mark.process
def test_constitutional_ai_on_a_parquet_folder_killed_and_resumed_is_that_on_json_lines(tmp_path):
    write_model(tmp_path / "model")
    pipeline.run(from_config_dict(cai(tmp_path, "jsonl")), tmp_path / "whole")
    values = cai(tmp_path, "folder")
    command = ["-c", RUN, json.dumps(values), str(tmp_path / "cut")]
    with processes.started(1, command) as running:
        end = time.monotonic() + 240
        while not list((tmp_path / "cut" / "compare").glob("rows-*.jsonl")) and time.monotonic() < end:
            time.sleep(0.02)
        running[0].kill()
    assert not (tmp_path / "cut" / "evaluate").exists()
    pipeline.run(from_config_dict(values), tmp_path / "cut")
    cut, whole = ((tmp_path / run / "sft" / "metrics.jsonl").read_bytes() for run in ("cut", "whole"))
    assert cut == whole
    for stage in ("revise", "compare", "evaluate"):
        cut, whole = (_rows(tmp_path / run / stage) for run in ("cut", "whole"))
        assert cut == whole and cut


def _rows(folder):
    return [path.read_bytes() for path in sorted(folder.glob("rows-*.jsonl"))]
