"""Metric files: one JSON object a line, equal byte for byte whenever the run is equal.

No clock, host name or path gets into a row. Floats are written in their shortest form that reads back exactly.
JSON has no NaN or infinity, so those are written as the strings "nan", "inf" and "-inf" and read back as floats.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from jaxalign.parallel import hosts
from jaxalign.tracking import jsonl

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricWriter:
    """Appends rows to `path`; a torn last line of a killed run is dropped when the file is opened.

    Every row reaches the operating system as it is written (so a killed process loses none) and the disk at `flush`,
    which belongs beside each checkpoint. Usable as a context manager. Of several processes the first one writes.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path) if hosts.is_first() else Path(os.devnull)
        self._file = jsonl.open_append(self.path)

    def truncate(self, step: int) -> None:
        """Keeps only the rows with `row["step"] < step`, in one atomic replacement: for a resume at `step`.

        Raises:
            UserError: a kept line is not a JSON object.
        """
        self._file.close()
        lines = jsonl.read_lines(self.path)
        kept = [line for number, line in enumerate(lines, 1)
                if line.strip() and jsonl.parse_row(line, self.path, number).get("step", -1) < step]
        if len(kept) < len(lines):
            jsonl.write_atomically(self.path, "".join(line + "\n" for line in kept))
        self._file = jsonl.open_append(self.path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one row. Values are Python, numpy or JAX scalars; integers stay integers, the rest become floats.

        Raises:
            TypeError, ValueError: a value is not a scalar number, or is named "step".
        """
        if "step" in values:
            raise ValueError('a metric may not be named "step": that field holds the step of the row')
        row = {"step": int(step)} | {name: _encode(name, value) for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Returns once every row is on disk."""
        self._file.flush()
        if self.path != Path(os.devnull):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes. Closing twice is harmless."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metric file, oldest first; "nan", "inf" and "-inf" become floats again. Missing file: no rows.

    Raises:
        UserError: a complete line is not a JSON object (a torn last line is left out silently).
    """
    rows = jsonl.read_rows(path)
    return [{name: _decode(value) for name, value in row.items()} for row in rows]


def _encode(name: str, value: Any) -> int | float | str:
    if isinstance(value, str):
        raise TypeError(f"metric {name} is the text {value!r}; a number is expected")
    if hasattr(value, "item"):  # numpy and JAX scalars; raises ValueError for more than one element
        value = value.item()
    if isinstance(value, numbers.Integral):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def _decode(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
