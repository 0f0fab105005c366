"""The answers of a server on disk, which survive the end of the process and are shared by several runs."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxalign.endpoint.records import EndpointRequest, Usage
from jaxalign.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, request TEXT NOT NULL, reply TEXT NOT NULL, model TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL NOT NULL, time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS stage_counts (
    stage TEXT NOT NULL, name TEXT NOT NULL, value REAL NOT NULL, PRIMARY KEY (stage, name)
);
INSERT OR IGNORE INTO totals VALUES ('cost', 0.0);
CREATE TRIGGER IF NOT EXISTS add_cost AFTER INSERT ON answers WHEN NEW.cost <> 0
    BEGIN UPDATE totals SET value = value + NEW.cost WHERE name = 'cost'; END;
"""
_ANSWER = "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_ADD_COST = "UPDATE totals SET value = value + ? WHERE name = 'cost'"
_ADD_COUNTS = "INSERT INTO stage_counts VALUES {} ON CONFLICT (stage, name) DO UPDATE SET value = value + excluded.value"
_CHUNK = 500
"""Keys per query; SQLite may limit a query to 999 parameters."""


class AnswerStore:
    """Raw replies by the key of their request, in one SQLite file. It never contains API keys or headers.

    Methods may be called from any thread. Several processes may use the same file at once.

    Args:
      path: the file; created with its folders if it does not exist.
      wait: seconds that a call waits for another process that writes to the file.

    Raises:
      UserError: the file cannot be opened, or it is not a store of answers.
    """

    def __init__(self, path: str | os.PathLike, wait: float = 30.0):
        self.path = Path(path)
        self._lock = threading.Lock()
        with self._usable():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=wait, isolation_level=None, check_same_thread=False)
            try:
                # A commit in the write-ahead log is passed to the operating system at once, so it survives the end of the
                # process. NORMAL omits only the synchronization that protects the last commits from a power failure.
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=NORMAL")
                self._connection.executescript(_SCHEMA)
            except sqlite3.Error:
                self._connection.close()
                raise

    def get_many(self, keys: Sequence[str]) -> dict[str, str]:
        """The raw JSON bodies of the stored replies among `keys`, by key."""
        replies: dict[str, str] = {}
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            marks = ",".join("?" * len(chunk))
            with self._usable():
                replies.update(self._connection.execute(f"SELECT key, reply FROM answers WHERE key IN ({marks})", list(chunk)))
        return replies

    def put(self, key: str, request: EndpointRequest, reply: str, model: str, usage: Usage, cost: float) -> str:
        """Stores a reply durably and adds its cost to the sum.

        If another process has stored a reply to the same request in the meantime, that reply stays, so that a repeated run
        reads the same reply as this one.

        Args:
          key: `request.key`.
          reply: the raw JSON body.
          model: the model's name in the reply.
          cost: the price of this reply, in the currency of the prices.

        Returns:
          The raw JSON body that is stored.
        """
        body = json.dumps([request.path, request.body], sort_keys=True, separators=(",", ":"), allow_nan=False)
        row = (key, body, reply, model, usage.prompt, usage.completion, cost, time.time())
        with self._usable():
            if self._connection.execute(_ANSWER, row).rowcount == 1:
                return reply
            if cost:
                self._connection.execute(_ADD_COST, (cost,))
            return self._connection.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()[0]

    def fact(self, name: str) -> str | None:
        """The value stored under a name, such as what a server can do; None if there is none."""
        with self._usable():
            row = self._connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def keep_fact(self, name: str, value: str) -> None:
        """Stores a value under a name, in place of an earlier one."""
        with self._usable():
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def add_cost(self, cost: float) -> None:
        """Adds the cost of a reply that is not stored, such as one of a wrong model, to the sum."""
        with self._usable():
            self._connection.execute(_ADD_COST, (cost,))

    def cost(self) -> float:
        """The sum of the costs of all replies, those of other processes included."""
        with self._usable():
            return self._connection.execute("SELECT value FROM totals WHERE name = 'cost'").fetchone()[0]

    def add_counts(self, stage: str, counts: Mapping[str, float]) -> None:
        """Adds to the counts of a stage, to all of them or to none. counts: by name, at least one."""
        values = [value for name, number in counts.items() for value in (stage, name, number)]
        with self._usable():
            self._connection.execute(_ADD_COUNTS.format(", ".join(["(?, ?, ?)"] * len(counts))), values)

    def counts(self, stage: str) -> dict[str, float]:
        """The counts of a stage by name; empty if it has none."""
        with self._usable():
            return dict(self._connection.execute("SELECT name, value FROM stage_counts WHERE stage = ?", (stage,)))

    def remove_counts(self, stage: str) -> None:
        """Removes the counts of a stage."""
        with self._usable():
            self._connection.execute("DELETE FROM stage_counts WHERE stage = ?", (stage,))

    def __len__(self) -> int:
        """The number of stored replies."""
        with self._usable():
            return self._connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0]

    def close(self) -> None:
        """Closes the file. A closed store cannot be used again."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Excludes other threads, and turns an error of the file into a `UserError` that names it."""
        with self._lock:
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                raise UserError(f'the store of answers "{self.path}" cannot be used ({error}); free the file or its disk, or '
                                "set config.endpoint.cache to another SQLite file on a local disk") from None
