"""Shards of generated rows. Each chunk is written atomically, so a crash loses only the chunks in progress."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.json_text import parse_json
from jaxalign.parallel import hosts
from jaxalign.records import Message, Prompt
from jaxalign.storage import json_bytes, json_lines, write_bytes_atomically
from jaxalign.tracking.jsonl import parse_row

TOGETHER = 4
"""The maximum number of chunks in one queue."""


class Queue(NamedTuple):
    """Neighbouring chunks whose prompts share one sampling queue, so that a slot is refilled as soon as its row ends.

    Attributes:
      rows: the rows of all these chunks.
      chunks: the rows of each chunk to write, by chunk number.
    """

    rows: range
    chunks: dict[int, range]


@dataclasses.dataclass(frozen=True)
class Shards:
    """The files rows-00000.jsonl, rows-00001.jsonl, ... in a stage's folder. With several processes, the first one writes.

    shards.json has the hash of each file, so that a resumed stage writes a damaged one again.
    """

    directory: Path

    def path(self, chunk: int) -> Path:
        return self.directory / f"rows-{chunk:05d}.jsonl"

    def finished(self, count: int) -> list[bool]:
        """Whether each of the first `count` chunks is written and intact; the same on all processes."""
        return hosts.once(lambda: self._intact(count))

    def _intact(self, count: int) -> list[bool]:
        hashes, intact = self._hashes(), []
        for chunk in range(count):
            path = self.path(chunk)
            intact.append(path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == hashes.get(path.name))
            if path.exists() and not intact[-1]:
                logging.getLogger("jaxalign").warning(f"{path} was cut or changed after it was written; it is written again")
        return intact

    def _hashes(self) -> dict[str, str]:
        """The hash of each file by its name; empty if shards.json is missing or damaged."""
        try:
            hashes = parse_json((self.directory / "shards.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return hashes if isinstance(hashes, dict) else {}

    def unfinished(self, queues: Sequence[Queue]) -> list[Queue]:
        """The queues that lack a chunk, each with only its missing chunks; the same on all processes.

        All rows of such a queue must be sampled again: rounding depends on the rows that share a queue.
        """
        done = self.finished(sum(len(queue.chunks) for queue in queues))
        missing = [{chunk: rows for chunk, rows in queue.chunks.items() if not done[chunk]} for queue in queues]
        return [Queue(queue.rows, chunks) for queue, chunks in zip(queues, missing, strict=True) if chunks]

    def write(self, chunk: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a chunk. All processes return once it is written."""
        content = json_lines(rows)

        def write() -> None:
            path = self.path(chunk)
            write_bytes_atomically(path, content)
            hashes = self._hashes() | {path.name: hashlib.sha256(content).hexdigest()}
            write_bytes_atomically(self.directory / "shards.json", json_bytes(dict(sorted(hashes.items()))))

        hosts.once(write)

    def write_all(self, queue: Queue, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the chunks of a queue. `rows` has one entry for each of the queue's rows."""
        for chunk, own in queue.chunks.items():
            self.write(chunk, [rows[row - queue.rows.start] for row in own])

    def read(self) -> Iterator[dict[str, Any]]:
        """Yields every row, in the order of the chunks. Raises UserError for a line that is not a JSON object."""
        for path in sorted(self.directory.glob("rows-*.jsonl")):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield from (parse_row(line, path, number) for number, line in enumerate(file, 1))


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """The fields of a row that identify its prompt."""
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    columns = {"columns": dict(prompt.columns)} if prompt.columns else {}
    return {"prompt_id": prompt.id, "messages": messages, "source": prompt.source} | columns


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a row written with `prompt_row`."""
    messages = tuple(Message(m["role"], m["content"]) for m in row["messages"])
    return Prompt(row["prompt_id"], messages, row["source"], row.get("columns", {}))


def chunks(total: int, size: int) -> list[range]:
    """The row numbers of each chunk."""
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def queues(total: int, size: int, first: int = 0) -> list[Queue]:
    """Rows [0, total) in chunks of `size`, numbered from `first`, grouped into queues of nearly equal numbers of chunks."""
    numbered = list(enumerate(chunks(total, size), first))
    count = -(-len(numbered) // TOGETHER)
    bounds = [len(numbered) * i // max(1, count) for i in range(count + 1)]
    shares = [numbered[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [Queue(range(own[0][1].start, own[-1][1].stop), dict(own)) for own in shares]
