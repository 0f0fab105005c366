"""Reads files that another process appends to, each part once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxalign.tracking import jsonl


class Tail:
    """The rows of a JSONL file that have been appended since the last call of `read`.

    Attributes:
      path: the file.
      replaced: whether the last `read` found another file than the one before, and began again at its first row.
    """

    def __init__(self, path: Path):
        self.path, self.replaced = path, False
        self._offset = self._lines = 0
        self._inode: int | None = None

    @property
    def lines(self) -> int:
        """The number of complete lines that have been read."""
        return self._lines

    def read(self) -> list[dict[str, Any]]:
        """The new complete rows; none if the file does not exist.

        A resumed run replaces its metric file by a shorter one, which is then read from the beginning.

        Raises:
          UserError: a line is not a JSON object.
        """
        try:
            file = open(self.path, "rb")
        except (FileNotFoundError, NotADirectoryError):
            self._begin(None)
            return []
        with file:
            stats = os.fstat(file.fileno())
            if stats.st_ino != self._inode or stats.st_size < self._offset:
                self._begin(stats.st_ino)
            else:
                self.replaced = False
            file.seek(self._offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows = []
        for line in whole.decode("utf-8", "replace").split("\n")[:-1]:
            self._lines += 1
            if line.strip():
                rows.append(jsonl.parse_row(line, self.path, self._lines))
        self._offset += len(whole)
        return rows

    def _begin(self, inode: int | None) -> None:
        self.replaced = self._inode is not None or self._offset > 0
        self._inode, self._offset, self._lines = inode, 0, 0
