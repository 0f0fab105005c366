"""TensorBoard: event files, written with tensorboardX. One event has all scalars of a step, so a kill never splits a step."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxalign.tracking.metrics import Metrics
from jaxalign.tracking.sinks.attachments import TABLE, Attachments
from jaxalign.tracking.sinks.base import Sink, clean, library

_CONFIG = "config/text_summary"
_FILES = "events.out.tfevents.*"


class TensorBoard(Sink):
    """Writes event files to FILES/tensorboard/GROUP/STAGE-ID; a resume adds a file there."""

    def open(self, config: Mapping[str, Any]) -> None:
        with library("tensorboard", "tensorboardX"):
            from tensorboardX import FileWriter, summary
        self._summary = summary
        folder = self.run.files / "tensorboard" / self.run.name
        folder.mkdir(parents=True, exist_ok=True)
        self._next, self._tags = 0, set()
        for event in read_events(folder):
            tags = {value.tag for value in event.summary.value}
            self._tags |= tags
            if any(value.WhichOneof("value") == "simple_value" for value in event.summary.value):
                self._next = max(self._next, event.step + 1)
        # A name has the time in seconds; without the number, a file of the same second would be replaced.
        number = len(list(folder.glob(_FILES)))
        self._writer = FileWriter(str(folder), max_queue=100, flush_secs=5, filename_suffix=f".{number:04}")
        if _CONFIG not in self._tags:
            for part in summary.hparams(dict(config), {})[:2]:
                self._writer.add_summary(part, 0)
            text = json.dumps(dict(config), indent=2, ensure_ascii=False)
            self._text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)
            self._writer.flush()

    def log(self, step: int, metrics: Metrics) -> None:
        proto = self._summary.Summary
        values = [proto.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_summary(proto(value=values), step)

    def attached(self) -> set[str]:
        return {tag.removesuffix("/text_summary") for tag in self._tags}

    def attach(self, attachments: Attachments, step: int) -> None:
        for name, values in attachments.histograms.items():
            self._writer.add_summary(self._summary.histogram(name, np.asarray(values), bins="auto"), step)
        for name in attachments.files:  # Event files cannot contain files.
            self._text(name, f"The run's {name} is in its work directory.", step)
        if attachments.rows:
            lines = [attachments.columns, ["---"] * len(attachments.columns), *attachments.rows]
            self._text(TABLE, "\n".join("|" + "|".join(map(_cell, line)) + "|" for line in lines), step)

    def _text(self, name: str, text: str, step: int) -> None:
        self._writer.add_summary(self._summary.text(name, text), step)

    def finish(self, status: str) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """A cell of a Markdown table."""
    text = "" if value is None else clean(str(value))
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def read_events(folder: Path) -> Iterator[Any]:
    """The events in the event files of a folder, oldest file first. A record that a kill cut short ends its file."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob(_FILES)):
        content, at = path.read_bytes(), 0
        while at + 12 <= len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            record = content[at + 12 : at + 12 + size]
            if at + 16 + size > len(content):
                break
            (checksum,) = struct.unpack_from("<I", content, at + 12 + size)
            crc = crc32c(record)
            if checksum != (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF:
                break
            yield Event.FromString(record)
            at += 16 + size
