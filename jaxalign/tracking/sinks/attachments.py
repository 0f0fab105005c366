"""What a finished stage shows besides its metrics: results, a table of samples, histograms and files, from its folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.workdir import read_object

TABLE = "samples"
COLUMNS = ("model", "prompt", "principle", "response", "critique", "revision", "response_a", "response_b", "responses", "label",
           "decided", "gold", "complete", "tokens", "kl", "outcome")
"""The fields of generated rows in the table of samples, in its order; "prompt" is the last message of a row."""
_TEXTS = ("response", "revision", "response_a", "response_b")
_NO_RESULT = ("low", "high", "count", "total", "endpoint", "seed", "data")


@dataclasses.dataclass(frozen=True)
class Attachments:
    """The attachments of a run.

    Attributes:
      columns: the names of the table's columns.
      rows: its rows, of text, numbers, booleans and None.
      histograms: the values of each histogram by name; all finite, and at least one.
      files: files by the name that a tracker gives them.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    histograms: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The names of all attachments."""
        return {*self.histograms, *self.files, *([TABLE] if self.rows else [])}

    def without(self, names: set[str]) -> Attachments:
        """The attachments that are not named."""
        return Attachments(
            self.columns, () if TABLE in names else self.rows,
            {name: values for name, values in self.histograms.items() if name not in names},
            {name: path for name, path in self.files.items() if name not in names},
        )


def read_attachments(folder: Path, samples: int) -> Attachments:
    """The attachments of a finished stage.

    Args:
      folder: the folder of the stage.
      samples: the largest number of rows in the table; they are spread evenly over the generated rows.

    Raises:
      UserError: a line of a file with generated rows is not a JSON object.
    """
    rows = [row for path in sorted(folder.glob("rows-*.jsonl")) for row in read_rows(path)]
    taken = [rows[i * len(rows) // min(samples, len(rows))] for i in range(min(samples, len(rows)))]
    shown = [_shown(row) for row in taken]
    columns = tuple(name for name in COLUMNS if any(row.get(name) is not None for row in shown))
    report = folder.parent / "report.html"
    files = {"report.html": report} if folder.name == "report" and report.is_file() else {}
    return Attachments(columns, tuple(tuple(row.get(name) for name in columns) for row in shown), _histograms(rows), files)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's cells by column. Values that are neither text nor a number are written as JSON."""
    messages = row.get("messages")
    prompt = messages[-1].get("content") if isinstance(messages, list) and messages and isinstance(messages[-1], dict) else None
    cells = {"prompt": prompt} | {name: row[name] for name in COLUMNS if name in row}
    return {name: json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
            for name, value in cells.items()}


def _histograms(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The numbers of the rows and the lengths of their texts, by name; apart for each model."""
    values: dict[str, list[float]] = {}
    for row in rows:
        numbers = {name: row.get(name) for name in ("label", "tokens", "kl")}
        numbers |= {f"{name}_characters": len(row[name]) for name in _TEXTS if isinstance(row.get(name), str)}
        suffix = f"/{row['model']}" if isinstance(row.get("model"), str) else ""
        for name, value in numbers.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                values.setdefault(f"histogram/{name}{suffix}", []).append(float(value))
    return values


def read_results(folder: Path) -> dict[str, int | float]:
    """The numbers in a stage's summary.json, by their path in it: "rates/ppo/harmful/rate". Lists, counts and the bounds of
    intervals are left out. Raises UserError if the file is damaged."""
    numbers: dict[str, int | float] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key not in _NO_RESULT:
                    add(inner, f"{name}/{key}" if name else key)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[name] = value

    add(read_object(folder / "summary.json"), "")
    return numbers
