"""Stored replies survive the end of a process, and several processes share a file."""

from __future__ import annotations

import os
import pathlib
import sqlite3
import subprocess
import sys
import threading

import pytest

from jaxalign.endpoint.records import Usage
from jaxalign.endpoint.store import AnswerStore
from jaxalign.errors import UserError
from tests.endpoint.clients import put, requests

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_get_many_returns_the_stored_replies_of_more_keys_than_a_query_may_have(tmp_path):
    store = AnswerStore(tmp_path / "new folder" / "a.sqlite")
    asked = requests(1200)
    for row in (0, 600, 1199):
        store.put(asked[row].key, asked[row], f'{{"row": {row}}}', "judge", Usage(), 0.0)
    found = store.get_many([request.key for request in asked])
    assert found == {asked[row].key: f'{{"row": {row}}}' for row in (0, 600, 1199)}
    assert len(store) == 3


def test_the_first_reply_to_a_request_stays_and_the_cost_of_both_counts(tmp_path):
    one, two = AnswerStore(tmp_path / "a.sqlite"), AnswerStore(tmp_path / "a.sqlite")
    assert put(one, 0, '"first"', 0.5) == '"first"'
    assert put(two, 0, '"second"', 0.25) == '"first"'
    assert one.cost() == two.cost() == 0.75
    two.add_cost(0.25)
    assert one.cost() == 1.0 and len(one) == 1


PROGRAM = """
import sys, os, signal
from tests.endpoint.clients import put
from jaxalign.endpoint.store import AnswerStore
store = AnswerStore(sys.argv[1])
for row in range(50):
    put(store, row, str(row), 0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_reply_survives_a_kill_of_the_process_once_put_has_returned(tmp_path):
    path = tmp_path / "a.sqlite"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=environment)
    store = AnswerStore(path)
    keys = [request.key for request in requests(50)]
    assert store.get_many(keys) == {key: str(row) for row, key in enumerate(keys)}
    assert store.cost() == 25.0


def test_threads_and_stores_write_to_one_file_at_once(tmp_path):
    stores = [AnswerStore(tmp_path / "a.sqlite") for _ in range(2)]
    threads = [
        threading.Thread(target=lambda part=part: [put(stores[part % 2], 40 * part + row, cost=1.0) for row in range(40)])
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0]) == 160 and stores[1].cost() == 160.0


def test_a_file_that_is_no_store_is_an_error_that_names_the_field(tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_text("no database " * 100)
    with pytest.raises(UserError, match="config.endpoint.cache"):
        AnswerStore(path)
    with pytest.raises(UserError, match="config.endpoint.cache"):
        AnswerStore(path / "below a file" / "b.sqlite")


def test_a_file_that_another_program_locks_is_an_error_after_the_wait(tmp_path):
    store = AnswerStore(tmp_path / "a.sqlite", wait=0.1)
    other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UserError, match="locked"):
        put(store, 0)
    other.execute("ROLLBACK")
    put(store, 0)
