"""Shards of generated records: each chunk is written whole, so a crash loses at most the chunks in flight."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.parallel import hosts
from jaxalign.records import Message, Prompt
from jaxalign.storage import write_atomically

TOGETHER = 4
"""Chunks whose prompts wait in one queue."""


class Queue(NamedTuple):
    """Neighbouring chunks whose prompts wait in one queue, so that slots are filled again as rows end.

    rows: of all of them; chunks: the rows of each that is to be written, by its number.
    """

    rows: range
    chunks: dict[int, range]


@dataclasses.dataclass(frozen=True)
class Shards:
    """rows-00000.jsonl, rows-00001.jsonl ... of a stage's directory. Of several processes the first one writes."""

    directory: Path

    def path(self, chunk: int) -> Path:
        return self.directory / f"rows-{chunk:05d}.jsonl"

    def finished(self, count: int) -> list[bool]:
        """Of each of the first `count` chunks, whether it is there: what the first process sees, on all."""
        return hosts.once(lambda: [self.path(chunk).exists() for chunk in range(count)])

    def unfinished(self, queues: Sequence[Queue]) -> list[Queue]:
        """Those of which a chunk is missing, each with its missing chunks alone; the same on all processes. All rows of such a
        queue are to be answered again, since which wait together decides how they are rounded."""
        done = self.finished(sum(len(queue.chunks) for queue in queues))
        missing = [{chunk: rows for chunk, rows in queue.chunks.items() if not done[chunk]} for queue in queues]
        return [Queue(queue.rows, chunks) for queue, chunks in zip(queues, missing, strict=True) if chunks]

    def write(self, chunk: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Returns, on all processes, when the chunk is there."""
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        hosts.once(lambda: write_atomically(self.path(chunk), "".join(lines)))

    def write_all(self, queue: Queue, rows: Sequence[Mapping[str, Any]]) -> None:
        """The chunks of a queue that are to be written. rows: one for each of all its rows."""
        for chunk, own in queue.chunks.items():
            self.write(chunk, [rows[row - queue.rows.start] for row in own])

    def read(self) -> Iterator[dict[str, Any]]:
        """Every row, in the order of the chunks."""
        for path in sorted(self.directory.glob("rows-*.jsonl")):
            with open(path, encoding="utf-8") as file:
                yield from (json.loads(line) for line in file)


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """The fields of a row that say which prompt it is about."""
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    columns = {"columns": dict(prompt.columns)} if prompt.columns else {}
    return {"prompt_id": prompt.id, "messages": messages, "source": prompt.source} | columns


def row_prompt(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a row written with `prompt_row`."""
    messages = tuple(Message(m["role"], m["content"]) for m in row["messages"])
    return Prompt(row["prompt_id"], messages, row["source"], row.get("columns", {}))


def chunks(total: int, size: int) -> list[range]:
    """Row numbers of each chunk."""
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def queues(total: int, size: int, first: int = 0) -> list[Queue]:
    """Rows 0 to `total` in chunks of `size`, numbered from `first`; queues of as many chunks each, or one fewer."""
    numbered = list(enumerate(chunks(total, size), first))
    count = -(-len(numbered) // TOGETHER)
    bounds = [len(numbered) * i // max(1, count) for i in range(count + 1)]
    shares = [numbered[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [Queue(range(own[0][1].start, own[-1][1].stop), dict(own)) for own in shares]
