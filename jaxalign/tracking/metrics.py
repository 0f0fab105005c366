"""Metrics and their files: one JSON object per line, byte-identical for identical runs.

Rows contain no times, host names or paths. A float is written in the shortest form that reads back exactly. JSON has no NaN or
infinity, so these are written as the strings "nan", "inf" and "-inf" and read back as floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.parallel import hosts
from jaxalign.storage import write_atomically
from jaxalign.tracking import jsonl

Metrics = Mapping[str, int | float]
"""The metrics of one step by name: plain Python numbers, which may be NaN or infinite."""

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def by_name(metrics: Any) -> dict[str, Any]:
    """Turns a record of metrics, a dataclass or a mapping, into a dict in alphabetical order of the names.

    Fields that are None are left out. A field that holds another record is replaced by the fields of that record.

    Raises:
      ValueError: a name occurs twice.
    """
    numbers_by_name: dict[str, Any] = {}
    for name, value in (metrics if isinstance(metrics, Mapping) else vars(metrics)).items():
        if value is None:
            continue
        entries = by_name(value) if isinstance(value, Mapping) or dataclasses.is_dataclass(value) else {name: value}
        if twice := numbers_by_name.keys() & entries.keys():
            raise ValueError(f"the metrics {sorted(twice)} are reported twice")
        numbers_by_name |= entries
    return dict(sorted(numbers_by_name.items()))


def to_metrics(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Converts Python, numpy or JAX scalars to plain numbers. Integers stay integers; all others become floats.

    Raises:
      TypeError, ValueError: a value is not a scalar number, or is named "step".
    """
    if "step" in values:
        raise ValueError('a metric must not be named "step": this field contains the step of the row')
    plain: dict[str, int | float] = {}
    for name, value in values.items():
        if isinstance(value, str):
            raise TypeError(f"metric {name} is the string {value!r}; a number is expected")
        if hasattr(value, "item"):  # A numpy or JAX scalar; raises ValueError for more than one element.
            value = value.item()
        plain[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
    return plain


class MetricFiles:
    """The tracker that always runs. It appends one row per step to DIRECTORY/metrics.jsonl.

    A logged row goes to the operating system immediately, so a killed process loses no rows. `flush`, to be called with each
    checkpoint, forces the rows to disk. Only the first process writes.
    """

    def __init__(self, directory: str | os.PathLike):
        self.path = Path(directory) / "metrics.jsonl" if hosts.is_first() else Path(os.devnull)
        self._file = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the file for steps from config["step"] (default 0), and drops existing rows of these steps.

        Also drops a last line that a crash truncated. The file is replaced atomically.

        Raises:
          UserError: a line is not a JSON object.
        """
        first = config.get("step", 0)
        lines = jsonl.read_lines(self.path)
        kept = [line for number, line in enumerate(lines, 1)
                if line.strip() and jsonl.parse_row(line, self.path, number).get("step", -1) < first]
        if len(kept) < len(lines):
            write_atomically(self.path, "".join(line + "\n" for line in kept))
        self._file = jsonl.open_append(self.path)

    def log(self, step: int, metrics: Metrics) -> None:
        """Appends one row. Raises TypeError or ValueError like `to_metrics`."""
        shown = {name: value if math.isfinite(value) else repr(value) for name, value in to_metrics(metrics).items()}
        row = {"step": int(step)} | shown
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Forces every row to disk."""
        self._file.flush()
        if self.path != Path(os.devnull):
            os.fsync(self._file.fileno())

    def finish(self, status: str = "done") -> None:
        """Flushes and closes the file. A second call does nothing."""
        if self._file is not None and not self._file.closed:
            self.flush()
            self._file.close()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metric file, oldest first: a step's metrics, and its number under "step". A missing file has no rows.

    A truncated last line is omitted silently.

    Raises:
      UserError: a complete line is not a JSON object of numbers.
    """
    rows = jsonl.read_rows(path)
    for number, row in enumerate(rows, 1):
        row.update(to_numbers(row, path, number))
    return rows


def to_numbers(row: Mapping[str, Any], path: str | os.PathLike, number: int) -> dict[str, Any]:
    """A row of the metric file `path` with numbers in place of "nan", "inf" and "-inf"; `number` counts the rows from 1.

    Raises:
      UserError: a value is not a number.
    """
    plain = {name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}
    wrong = next((name for name, value in plain.items() if not isinstance(value, (int, float))), None)
    if wrong is not None:
        raise UserError(f"{path}, row {number}: {wrong} is {plain[wrong]!r}; a number is expected: restore the file, or "
                        "move the folder of its stage aside to run the stage again")
    return plain
