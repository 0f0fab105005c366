"""Reads the .wandb files of a run: what W&B has stored on this machine. wandb itself has no public reader.

A file has a header of 7 bytes and then records in the log format of LevelDB: blocks of 32 KiB with chunks of (checksum,
length, type), where a record may span chunks. wandb writes whole blocks, so a kill cuts a file anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER, _CHUNK = 32768, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(folder: Path, run_id: str) -> Iterator[Any]:
    """The records of all .wandb files of a run, oldest file first; those after a damaged chunk of a file are left out.

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
