"""The command `watch`: its table for runs in every state, its arguments, and the files that a run writes for it."""

from __future__ import annotations

import json
import pathlib

import pytest
from rich.console import Console

from jaxalign import watch
from jaxalign.tracking.watching.run import RunStatus
from jaxalign.tracking.watching.screen import render


def make_run(folder: pathlib.Path, **files) -> str:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_jsonl", ".jsonl").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in (content if isinstance(content, list) else [content])))
    return str(folder)


def test_once_prints_a_row_for_each_run_and_a_sentence_for_each_problem(tmp_path, capsys):
    done = make_run(tmp_path / "done", config_json={"stages": ["ppo"]}, ppo__manifest_json={"status": "done"},
                    ppo__metrics_jsonl=[{"step": n, "score": 0.5, "kl_k3": 12.0, "response_length": 9.0} for n in range(30)])
    new = make_run(tmp_path / "new", config_json={"stages": ["sft"]})
    assert watch.main(["watch", "--once", done, new, str(tmp_path / "none")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "stage", "progress", "score", "KL", "length"]
    assert [line.split()[:2] for line in lines[1:4]] == [["done", "finished"], ["new", "waiting"], ["none", "unreadable"]]
    assert lines[1].split()[-3:] == ["0.5", "12", "9"]
    text = " ".join(" ".join(lines[4:]).split())
    assert "done, ppo: The KL to the reference is 12 nats per response, more than one nat per token. Raise" in text
    assert f"none: The work directory {tmp_path / 'none'} is not a folder." in text


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "no work directory is given; pass the --workdir of one or more runs"),
    (["--onec", "runs/a"], "--onec is not a flag of watch"),
    (["--every=0", "runs/a"], "--every is '0'; a number of seconds between 0.1 and 3600 is expected"),
    (["--every=nan", "runs/a"], "--every is 'nan'"),
    (["--prometheus=web", "runs/a"], "--prometheus is 'web'; a port between 1 and 65535 is expected"),
])
def test_a_mistake_in_the_arguments_is_one_sentence(capsys, arguments, says):
    assert watch.main(["watch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err and captured.err.count("\n") == 1


def test_numbers_that_do_not_fit_the_terminal_are_left_out_and_no_cell_is_cut(tmp_path):
    run = RunStatus("a_run", tmp_path, "running", stage="preference", finished_stages=4, stages=8, count=1200, total=25_000,
                    seconds_left=4000.0, tokens_per_second=123_456.0, loss=0.123456, score=1.5, kl=12.25, length=100.5,
                    system={"process_memory": 2**31, "process_cpu": 0.5})
    titles = {}
    for width in (90, 130, 160):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(render([run], width))
        head, row = captured.get().splitlines()
        titles[width] = head.split()
        assert "a_run" in row and "preference (4/8 done)" in row and "1,200/25,000 steps" in row and "…" not in head + row
    assert titles[90] == ["run", "state", "stage", "progress", "left", "score"]
    assert titles[160][-4:] == ["KL", "length", "memory", "use"] and set(titles[90]) < set(titles[130]) < set(titles[160])
