"""Work directories behind one protocol: read and write small files whole, list, remove and move files, and lock the directory.

`LocalStorage` keeps a work directory on a local or shared disk. The pipeline and the stages' manifests use only this protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


class Storage(Protocol):
    """The files of one work directory. Names are relative to it, with "/" between folders."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file atomically: readers see the old or the new content, even after a crash. Creates missing folders."""

    def list(self, name: str = "") -> list[str]:
        """The names of all files below a folder, relative to it, sorted; empty if the folder does not exist."""

    def size(self, name: str) -> int:
        """The size of a file in bytes; 0 if it does not exist."""

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its contents; does nothing if the name does not exist."""

    def move_aside(self, name: str) -> str:
        """Renames a folder to the first unused name of NAME.old-1, NAME.old-2, ... and returns that name."""

    def lock(self) -> AbstractContextManager[None]:
        """Holds the lock while the context lasts, and releases it however this process ends.

        Raises:
          UserError: another process holds the lock.
        """

    def path(self, name: str = "") -> Path:
        """The local path of a file or folder, for stages that write large files themselves."""


class LocalStorage:
    """A work directory on a disk that this machine mounts.

    Args:
      folder: the directory; `lock` creates it if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._locked = False

    def path(self, name: str = "") -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        if self._locked:
            require_in_place(self.folder)
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(self.path(name), content)

    def list(self, name: str = "") -> list[str]:
        folder = self.path(name)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())

    def size(self, name: str) -> int:
        path = self.path(name)
        return path.stat().st_size if path.is_file() else 0

    def remove(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def move_aside(self, name: str) -> str:
        number = 1
        while self.path(aside := f"{name}.old-{number}").exists():
            number += 1
        self.path(name).rename(self.path(aside))
        return aside

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder's file .lock, which holds this process's id. The system releases the lock when the process ends.

        Removes the temporary files of killed processes.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / ".lock", "a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"the work directory {self.folder} cannot be used ({error.strerror or error}); choose another "
                            "--workdir") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise UserError(f"the work directory {self.folder} is in use by process {file.read().strip() or '?'}; wait for "
                                "it to end, or choose another --workdir") from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            for path in self.folder.rglob(".*.tmp"):  # Unfinished files of `write_bytes_atomically` of a killed process.
                if _TEMPORARY.fullmatch(path.name) and path.is_file():
                    path.unlink(missing_ok=True)
            self._locked = True
            try:
                yield
            finally:
                self._locked = False


def read_json(storage: Storage, name: str) -> Any:
    """The value of a JSON file; None if it does not exist. Raises ValueError if it is not JSON."""
    content = storage.read(name)
    return None if content is None else parse_json(content.decode("utf-8"))


def write_json(storage: Storage, name: str, value: Any) -> None:
    """Replaces a JSON file atomically."""
    storage.write(name, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """Indented JSON with a final newline. Lone surrogates become "?". Raises ValueError for NaN and infinities."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")


def write_bytes_atomically(path: str | os.PathLike, content: bytes) -> None:
    """Replaces the file `path` atomically, through a temporary file in the same folder, which it creates if needed.

    Raises:
      UserError: the parent of that folder does not exist.
    """
    path = Path(path)
    require_in_place(path.parent.parent)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object per line. Lone surrogates become "?"."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "replace")


MOVED = ("{folder} does not exist, or lost files during a write; if it was moved or deleted, move it back, and run the same "
         "command again to resume")


def require_in_place(folder: Path) -> None:
    """Raises UserError if a folder does not exist, so that a run whose folder was moved does not begin another one."""
    if not folder.is_dir():
        raise UserError(MOVED.format(folder=folder))


def write_atomically(path: str | os.PathLike, content: str) -> None:
    """Replaces a text file atomically, encoded as UTF-8; lone surrogates become "?"."""
    write_bytes_atomically(path, content.encode("utf-8", "replace"))
