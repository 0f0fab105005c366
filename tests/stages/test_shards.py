"""Shards of generated rows: each is complete or absent."""

from __future__ import annotations

import json

import pytest

from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt
from jaxalign.stages.shared import shards as module
from jaxalign.stages.shared.shards import Queue, Shards, chunks, prompt_row, queues, row_prompt


def test_chunks_cover_every_row_once():
    assert chunks(7, 3) == [range(0, 3), range(3, 6), range(6, 7)]
    assert chunks(6, 3) == [range(0, 3), range(3, 6)] and chunks(0, 3) == []


def test_a_queue_has_at_most_four_chunks():
    two, three = {3: range(0, 2), 4: range(2, 4)}, {5: range(4, 6), 6: range(6, 8), 7: range(8, 9)}
    assert queues(9, 2, 3) == [Queue(range(0, 4), two), Queue(range(4, 9), three)]
    assert [len(queue.chunks) for queue in queues(16, 2)] == [4, 4] and len(queues(7, 2)) == 1
    assert queues(0, 2) == []


def test_a_queue_with_a_missing_chunk_is_repeated_and_only_that_chunk_is_written(tmp_path):
    made = Shards(tmp_path)
    for chunk in (0, 1, 3, 4):
        made.write(chunk, [])
    assert made.unfinished(queues(12, 2)) == [Queue(range(0, 6), {2: range(4, 6)}), Queue(range(6, 12), {5: range(10, 12)})]
    made.write(2, [])
    made.write(5, [])
    assert made.unfinished(queues(12, 2)) == []


def test_rows_are_read_in_the_order_of_chunks_not_of_writing(tmp_path):
    made = Shards(tmp_path)
    made.write(11, [{"n": 3}])
    made.write(2, [{"n": 1}, {"n": 2}])
    assert [row["n"] for row in made.read()] == [1, 2, 3]
    assert [number for number, there in enumerate(made.finished(12)) if there] == [2, 11]


def test_any_text_survives_the_round_trip(tmp_path):
    texts = ["line\nbreak", "naïve 東京 \U0001f600", 'quote " and \\', "\u2028 and \x85 end no line", ""]
    Shards(tmp_path).write(0, [{"text": text} for text in texts])
    assert [row["text"] for row in Shards(tmp_path).read()] == texts


def test_a_prompt_survives_the_round_trip_through_its_row():
    prompt = Prompt("p-1", (Message("user", "a"), Message("assistant", "b"), Message("user", "c")), "red_team")
    assert row_prompt(json.loads(json.dumps(prompt_row(prompt)))) == prompt


def test_pitfall_19_a_crash_loses_at_most_the_rows_in_flight(tmp_path, monkeypatch):
    """Another system gathered all answers in memory and lost them when one request failed."""
    made = Shards(tmp_path)
    made.write(0, [{"n": 0}])

    def crash(path, content):
        (path.parent / f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
        raise RuntimeError("killed in the middle of writing")

    monkeypatch.setattr(module, "write_bytes_atomically", crash)
    with pytest.raises(RuntimeError):
        made.write(1, [{"n": 1}, {"n": 2}])
    monkeypatch.undo()
    assert made.finished(2) == [True, False]
    assert [row["n"] for row in made.read()] == [0]  # a partially written file is not a shard
    made.write(1, [{"n": 1}, {"n": 2}])
    assert [row["n"] for row in made.read()] == [0, 1, 2]


@pytest.mark.parametrize("act", ["cut", "flip", "empty", "other", "hashes lost", "hashes damaged"])
def test_a_damaged_shard_of_a_running_stage_is_written_again(tmp_path, act, caplog):
    shards = Shards(tmp_path)
    for chunk in range(3):
        shards.write(chunk, [{"row": 2 * chunk}, {"row": 2 * chunk + 1}])
    assert shards.finished(4) == [True, True, True, False] and not caplog.records
    path, hashes = shards.path(1), tmp_path / "shards.json"
    content = path.read_bytes()
    if act.startswith("hashes"):
        hashes.unlink() if act == "hashes lost" else hashes.write_text("[" * 100_000)
        assert shards.finished(3) == [False] * 3
        return
    path.write_bytes({"cut": content[:-3], "flip": content.replace(b"2", b"3"), "empty": b"",
                      "other": shards.path(0).read_bytes()}[act])
    assert shards.finished(3) == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} was cut or changed after it was written; it is written again"
    ]
    shards.write(1, [{"row": 2}, {"row": 3}])
    assert shards.finished(3) == [True] * 3 and path.read_bytes() == content


@pytest.mark.parametrize("line", [b'{"a": ', b"\xff", b"3"])
def test_a_damaged_row_is_reported_with_its_file_and_line(tmp_path, line):
    (tmp_path / "rows-00000.jsonl").write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"rows-00000\.jsonl, line 2 "):
        list(Shards(tmp_path).read())
