"""The commands that show and measure the judge behind a server."""

from __future__ import annotations

import dataclasses
import json
import sqlite3

import pytest

from jaxalign import judge_audit, pipeline
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.stages.shared import preview
from jaxalign.stages.shared.base import StageContext
from tests.endpoint.runs import config


@pytest.fixture(scope="module")
def folder(tiny_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    (folder / "model").symlink_to(tiny_server.model)
    questions = [f"Is answer {i} better, A or B?" for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    answers = {"chosen": "Answer A is better.", "rejected": "Answer B is shorter."}
    pairs = [{"prompt": question} | answers for question in questions[:6]]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def audited(folder, capsys, *arguments):
    """The audit that the command writes, and its output."""
    out = folder / "audit.json"
    common = ("--limit=6", f"--out={out}", f"--workdir={folder / 'audited'}", f"--config.judge.audit={folder / 'pairs.jsonl'}",
              "--config.feedback.max_outside_mass=1.0", "--config.feedback.templates=chat", "--config.compile_cache=None")
    code = judge_audit.main(["judge_audit", "--config=configs/quickstart.py", *common, *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(out.read_text()), captured.out


@pytest.mark.slow
def test_an_audit_asks_the_server_in_both_orders_and_can_be_repeated_offline(folder, tiny_server, capsys):
    server = ("--config.feedback.judge=endpoint", f"--config.endpoint.url={tiny_server.server.url}",
              "--config.feedback.principles_per_comparison=3")
    found, printed = audited(folder, capsys, *server)
    assert "The judge of stage compare, the model of the server in config.endpoint, compared" in printed
    audit = found["audit"]
    assert audit["pairs"] == 6 and audit["requests"] == 6 * 3 * 2 and set(audit["problems"]) <= {"unreadable"}
    assert 0 < audit["outside"] < 1
    assert audited(folder, capsys, *server, "--config.endpoint.offline=True")[0] == found


@pytest.mark.slow
def test_an_audit_does_not_change_the_counts_of_a_stage(folder, tiny_server, capsys):
    audited(folder, capsys, "--config.feedback.judge=endpoint", f"--config.endpoint.url={tiny_server.server.url}")
    with sqlite3.connect(folder / "audited" / "endpoint.sqlite") as connection:
        assert connection.execute("SELECT COUNT(*) FROM stage_counts").fetchone() == (0,)


@pytest.mark.slow
def test_the_preview_shows_the_messages_that_the_server_gets(folder, tiny_server):
    values = resolve_auto(dataclasses.replace(config(folder, tiny_server.server.url), stages=("compare",)))
    shown = preview.rows(StageContext(values, folder / "run", folder / "run" / "compare", False), "compare", 16)[1]
    judged = [row for row in shown if not row.ids]
    assert len(judged) == 16 and not (folder / "run" / "endpoint.sqlite").exists()  # Nothing was asked.
    pipeline.run(values, folder / "run")
    with sqlite3.connect(folder / "run" / "endpoint.sqlite") as connection:
        bodies = [json.loads(text)[1] for (text,) in connection.execute("SELECT request FROM answers")]
    sent = [body["messages"][0]["content"] for body in bodies]
    rows = [json.loads(line) for path in sorted((folder / "run" / "compare").glob("rows-*.jsonl")) for line in open(path)]
    different = [(row, one) for row, one in zip(rows, judged, strict=True) if row["response_a"] != row["response_b"]]
    assert different
    for row, one in different:
        assert one.lines[0] == "  user:" and "options: A, B, C" in one.lines
        message = "\n".join(line.removeprefix("    ") for line in one.lines[1:] if line.startswith("    ") or not line)
        message = message.replace("[answer A]", row["response_a"]).replace("[answer B]", row["response_b"])
        assert message in sent
