"""Stages whose judge is behind a real server: every answer is asked once, and a run is replayed without the server."""

from __future__ import annotations

import json

import pytest

from jaxalign import pipeline
from jaxalign.errors import UserError
from tests.endpoint.runs import config, rows, write_inputs


@pytest.fixture(scope="module")
def folder(tiny_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_inputs(folder, tiny_server.model)
    return folder


@pytest.fixture(scope="module")
def finished(tiny_server, folder):
    pipeline.run(config(folder, tiny_server.server.url), folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_rows_name_the_way_in_which_a_verdict_was_read(finished):
    pairs = [json.loads(line) for path in sorted((finished / "compare").glob("rows-*.jsonl")) for line in open(path)]
    verdicts = [row for row in pairs if row["response_a"] != row["response_b"] and row.get("outcome") != "missing_answer"]
    assert len(verdicts) > 4
    assert all({"top_logprobs", "votes"} & set(row.get("notes", ())) for row in verdicts)


def test_an_answer_that_is_not_stored_ends_an_offline_run(folder, finished):
    offline = config(folder, "http://127.0.0.1:9", offline=True, cache=str(finished / "endpoint.sqlite"))
    with pytest.raises(UserError, match="not stored"):  # What another server can do is not known.
        pipeline.run(offline, folder / "elsewhere")


def test_a_replay_asks_nothing_and_writes_equal_rows(folder, finished, tiny_server):
    offline = config(folder, tiny_server.server.url, offline=True, cache=str(finished / "endpoint.sqlite"))
    pipeline.run(offline, folder / "replay")
    assert rows(folder / "replay") == rows(finished)
