"""Weights & Biases, online or offline (WANDB_MODE=offline)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxalign.tracking.metrics import Metrics
from jaxalign.tracking.sinks.attachments import TABLE, Attachments
from jaxalign.tracking.sinks.base import Sink, call_within, clean, library

_SECONDS = 60.0
"""How long W&B may take to log in or to begin a run."""
_BLOCK, _HEADER, _CHUNK = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class WandB(Sink):
    """Sends to W&B. Local files are in FILES/wandb, or in WANDB_DIR if it is set.

    The steps that W&B has are those of the server. Offline, they are those in the local files of the run: wandb buffers rows,
    so a killed process leaves fewer there than it logged.
    """

    def open(self, config: Mapping[str, Any]) -> None:
        with library("wandb", "wandb"):
            import wandb
        self._wandb = wandb
        folder = Path(os.environ.get("WANDB_DIR") or self.run.files)
        folder.mkdir(parents=True, exist_ok=True)
        self._next, self._names = 0, set()
        mode = wandb.setup().settings.mode
        if mode == "online" and not call_within(_SECONDS, lambda: wandb.login(prompt=False), "the login"):
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        if mode == "offline":
            self._read(folder / "wandb")
        # Without the command line, the git repository and the packages, which may contain secrets.
        settings = wandb.Settings(console="off", silent=True, disable_git=True, x_disable_meta=True, x_save_requirements=False,
                                  save_code=False, init_timeout=_SECONDS)
        self._run = wandb.init(
            project=self.settings.project, id=self.run.id, name=self.run.name, group=self.run.group, job_type=self.run.stage,
            tags=list(self.settings.tags) or None, config=dict(config), dir=str(folder), resume="allow", settings=settings,
        )
        if mode == "online":
            self._next = self._run.step
            self._names = {name for name in dict(self._run.summary)}
            print(f"tracker wandb: {self._run.url}", flush=True)

    def _read(self, folder: Path) -> None:
        """Takes the steps and attachments from the local files."""
        for record in read_records(folder, self.run.id):
            if record.WhichOneof("record_type") == "artifact":
                self._names.add(record.artifact.name.removeprefix(f"{self.run.id}-"))
            elif record.WhichOneof("record_type") == "history":
                names = {item.key or item.nested_key[0] for item in record.history.item}  # A table has several parts.
                if TABLE in names or any(name.startswith("histogram/") for name in names):
                    self._names |= names
                else:
                    self._next = max(self._next, record.history.step.num + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def attach(self, attachments: Attachments, step: int) -> None:
        wandb, row = self._wandb, {}
        if attachments.rows:
            cells = [[clean(cell) if isinstance(cell, str) else cell for cell in line] for line in attachments.rows]
            row[TABLE] = wandb.Table(columns=list(attachments.columns), data=cells, allow_mixed_types=True)
        row |= {name: wandb.Histogram(list(values)) for name, values in attachments.histograms.items()}
        if row:
            self._run.log(row, step=step, commit=True)
        for name, path in attachments.files.items():
            artifact = wandb.Artifact(f"{self.run.id}-{name}", type="report")
            artifact.add_file(str(path), name=name)
            self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "done" else 1)


def read_records(folder: Path, run_id: str) -> Iterator[Any]:
    """The records of all .wandb files of a run, oldest file first; those after a damaged chunk of a file are left out.

    wandb itself has no public reader. A file has a header of 7 bytes and then records in the log format of LevelDB: blocks of
    32 KiB with chunks of (checksum, length, type), where a record may span chunks. wandb writes whole blocks, so a kill cuts a
    file anywhere.

    Args:
      folder: the folder "wandb" that wandb writes.
      run_id: the id of the run.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        for record in _records(path.read_bytes()):
            yield Record.FromString(record)


def _records(content: bytes) -> Iterator[bytes]:
    at, parts = _HEADER, []
    while at + _CHUNK <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK:  # The end of a block is padded.
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        chunk = content[at + _CHUNK : at + _CHUNK + length]
        if len(chunk) < length or not _FULL <= kind <= _LAST:
            return
        parts = [chunk] if kind in (_FULL, _FIRST) else [*parts, chunk]
        at += _CHUNK + length
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
