"""Parquet and Arrow files as parts of a table. Requires pyarrow (the extra "data")."""

from __future__ import annotations

import bisect
import contextlib
import datetime
import decimal
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jaxalign.data.sources.tables import CHUNK, Chunk, Part, Undecodable
from jaxalign.errors import UserError

PARQUET_MAGIC, ARROW_MAGIC, FEATHER_MAGIC = b"PAR1", b"ARROW1", b"FEA1"
_NOT_UTF8 = "Invalid UTF8"  # In pyarrow's message on a text with other bytes.
_BUFFER = 1 << 20  # Bytes of a column that are read at a time, so that memory does not depend on the size of row groups.


def arrow_part(path: pathlib.Path) -> Part:
    """A Parquet or Arrow file, by its first bytes.

    Raises:
      UserError: pyarrow is not installed, or the file is missing, damaged or of another format.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError(f"{path} is a Parquet or Arrow file, which needs pyarrow; install it with pip install "
                        "'jaxalign[data]'") from None
    with _reading(path), path.open("rb") as file:
        magic = file.read(6)
    if not magic:
        raise UserError(f"{path} is empty; download or copy it again")
    if magic.startswith(FEATHER_MAGIC):
        raise UserError(f"{path} has the format Feather 1, which is not read; write it again as Feather 2 or Parquet")
    with _reading(path):
        return _ParquetPart(path) if magic.startswith(PARQUET_MAGIC) or path.suffix == ".parquet" else _ArrowPart(path, magic)


def check_schemas(parts: Sequence[Part]) -> None:
    """Raises UserError if the columns of a part differ from those of the first part in name or type."""
    first = parts[0]
    for part in parts[1:]:
        if set(part.columns) != set(first.columns):
            raise UserError(f"{part.name} has the columns {', '.join(part.columns)}, but {first.name} before it has "
                            f"{', '.join(first.columns)}; give all files of a folder the same columns")
        for name in first.columns:
            types = [str(each.schema.field(name).type).replace("large_", "").replace("string_view", "string")
                     for each in (first, part)]
            if types[0] != types[1] and "null" not in types:
                raise UserError(f"{part.name} has the column {name!r} of type {types[1]}, but in {first.name} before it "
                                f"the type is {types[0]}; give the column one type in all files of a folder")


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise UserError(f"the file {path} does not exist; give the path of a data file") from None
    except (pa.ArrowException, OSError, ValueError, NotImplementedError, SystemError, OverflowError) as error:
        reason = str(error).strip().partition("\n")[0][:200].rstrip(". ") or type(error).__name__
        raise UserError(f"{path} is damaged or cut short ({reason}); download or copy it again") from None


class _ParquetPart:
    """A Parquet file. Rows are decoded in order from the beginning of their row group, `CHUNK` at a time."""

    def __init__(self, path: pathlib.Path):
        self.name, self._path = str(path), path
        with self._open() as file:
            self.schema = file.schema_arrow
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self.columns = tuple(self.schema.names)
        self._starts = [0, *itertools.accumulate(groups)]
        self._plain = all(_is_plain(field.type) for field in self.schema)
        self._group, self._next, self._batches = -1, 0, iter(())

    def __len__(self) -> int:
        return self._starts[-1]

    def chunk(self, index: int) -> Chunk:
        with _reading(self._path):
            group = bisect.bisect_right(self._starts, index) - 1
            if group != self._group or index < self._next:
                self._group, self._next, self._batches = group, self._starts[group], self._read(group)
            for batch in self._batches:
                start, self._next = self._next, self._next + len(batch)
                if index < self._next:
                    return Chunk(start, _decoded(batch, self._plain))
        self._group = -1
        raise UserError(f"{self._path} is damaged or cut short (row group {group} ends before its last row); download or copy "
                        "it again")

    def release(self) -> None:
        self._group, self._batches = -1, iter(())

    def _open(self) -> Any:
        import pyarrow as pa
        from pyarrow import parquet

        # A file allocates from the pool that is the default when it is opened. pyarrow's own pools do not return freed memory
        # to the system: 30 MB after a window of small rows.
        pool = pa.default_memory_pool()
        pa.set_memory_pool(pa.system_memory_pool())
        try:
            return parquet.ParquetFile(self._path, buffer_size=_BUFFER, pre_buffer=False)
        finally:
            pa.set_memory_pool(pool)

    def _read(self, group: int) -> Iterator[Any]:
        with self._open() as file:
            yield from file.iter_batches(batch_size=CHUNK, row_groups=[group], use_threads=False)


class _ArrowPart:
    """An Arrow file or stream, mapped into memory."""

    def __init__(self, path: pathlib.Path, magic: bytes):
        import pyarrow as pa

        self.name, self._path = str(path), path
        source = pa.memory_map(str(path))
        if magic.startswith(ARROW_MAGIC):
            reader = pa.ipc.open_file(source)
            self._batch = reader.get_batch
            lengths = [len(reader.get_batch(i)) for i in range(reader.num_record_batches)]
        else:
            reader = pa.ipc.open_stream(source)
            batches = list(reader)
            self._batch, lengths = batches.__getitem__, [len(batch) for batch in batches]
        self.schema, self.columns = reader.schema, tuple(reader.schema.names)
        self._starts = [0, *itertools.accumulate(lengths)]
        self._plain = all(_is_plain(field.type) for field in self.schema)

    def __len__(self) -> int:
        return self._starts[-1]

    def chunk(self, index: int) -> Chunk:
        number = bisect.bisect_right(self._starts, index) - 1
        first = self._starts[number]
        offset = (index - first) // CHUNK * CHUNK
        with _reading(self._path):
            return Chunk(first + offset, _decoded(self._batch(number).slice(offset, CHUNK), self._plain))

    def release(self) -> None:
        """The file stays mapped, which needs no memory of the process."""


def _is_plain(kind: Any) -> bool:
    """Whether the values of a type are JSON values as they are."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    simple = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_null)
    return any(check(kind) for check in simple)


def _decoded(batch: Any, plain: bool) -> list[Any]:
    """The rows of a batch as dictionaries of JSON values, or `Undecodable`. Raises pyarrow's errors if the batch is damaged."""
    from pyarrow import ArrowInvalid

    try:
        batch.validate(full=True)  # Decoding offsets beyond the end of a buffer would end the process.
        rows = batch.to_pylist()
    except ArrowInvalid as error:
        if _NOT_UTF8 not in str(error):
            raise
        if len(batch) == 1:
            return [Undecodable("a text is not UTF-8")]
        return [row for i in range(len(batch)) for row in _decoded(batch.slice(i, 1), plain)]
    return rows if plain else [row if isinstance(row, Undecodable) else json_value(row) for row in rows]


def json_value(value: Any) -> Any:
    """A decoded value as a JSON value. Bytes that are not UTF-8, such as images, numbers that are not finite and values without
    an equivalent become None."""
    if isinstance(value, dict):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, bool, int)) or value is None else None
