"""Reads what the services of the built-in trackers have: every logged row, in the order in which it was logged."""

from __future__ import annotations

import collections
import json
import pathlib
import sqlite3
import struct


def tensorboard(files: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """The scalars of the event files; a TFRecord is an 8-byte length, a checksum, the content and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    rows = []
    for path in sorted(files.rglob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at + 12 < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            if at + 16 + size > len(content):
                break
            event = Event.FromString(content[at + 12 : at + 12 + size])
            scalars = {v.tag: v.simple_value for v in event.summary.value if v.WhichOneof("value") == "simple_value"}
            rows += [(event.step, scalars)] if scalars else []
            at += 16 + size
    return rows


def tensorboard_tags(files: pathlib.Path) -> list[str]:
    """The tags of all values in the event files, in their order."""
    from jaxalign.tracking.sinks.tensorboard import read_events

    folders = sorted({path.parent for path in files.rglob("events.out.tfevents.*")})
    return [value.tag for folder in folders for event in read_events(folder) for value in event.summary.value]


def wandb(files: pathlib.Path, group: str) -> list[tuple[int, dict[str, float]]]:
    """The history of the run of a group."""
    from jaxalign.tracking.sinks.wandb import read_records

    rows = []
    for run in sorted({path.stem.removeprefix("run-") for path in files.glob("wandb/*run-*/run-*.wandb")}):
        records = list(read_records(files / "wandb", run))
        if not any(record.run.run_group == group for record in records):
            continue
        for record in records:
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.append((record.history.step.num, {name: value for name, value in values.items() if name[0] != "_"}))
    return rows


def mlflow(files: pathlib.Path, group: str) -> list[tuple[int, dict[str, float]]]:
    query = ("select step, key, value from metrics where run_uuid in "
             "(select run_uuid from tags where key = 'group' and value = ?) order by step")
    with sqlite3.connect(files / "mlflow.db") as connection:
        entries = connection.execute(query, (group,)).fetchall()
    assert len(entries) == len({(step, key) for step, key, _ in entries})
    rows = collections.defaultdict(dict)
    for step, key, value in entries:
        rows[step][key] = value
    return sorted(rows.items())


def trackio(database: pathlib.Path, group: str) -> list[tuple[int, dict[str, float]]]:
    query = "select step, metrics from metrics where run_name like ? order by id"
    with sqlite3.connect(database) as connection:
        rows = connection.execute(query, (f"{group}/%",)).fetchall()
    return [(step, json.loads(metrics)) for step, metrics in rows]
