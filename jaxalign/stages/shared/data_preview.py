"""What the preview shows of the data itself: the columns of each file, their mapping, and the first row."""

from __future__ import annotations

import json

from jaxalign.config import Config
from jaxalign.config.sections.data import parse_columns
from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.data.sources.rows import open_rows
from jaxalign.data.sources.tables import TableRows
from jaxalign.registry.data_sources import data_source
from jaxalign.stages.shared.reads import data_files

_MOST_CHARACTERS = 400


def data_lines(config: Config) -> list[str]:
    """Lines on the tables of `config.data`, and with `data.columns` on all of its files.

    Raises:
      UserError: a file cannot be read, or a mapped column does not exist.
    """
    if not data_source(config).rows:
        return []
    lines, mapping = [], parse_columns(config.data.columns)
    for path, field in data_files(config).items():
        prompts = "" if data_source(config).prompts is None else config.data.prompt_field
        rows = open_rows(path, config.data.columns, prompts)
        if not isinstance(rows, TableRows) and not mapping:
            continue
        first = next(iter(rows), None)
        names = rows.columns or (() if first is None or isinstance(first, BrokenLine) else tuple(first.value))
        count = f"{len(rows):,} rows, " if isinstance(rows, TableRows) else ""
        lines.append(f"config.{field}: {path} ({count}fields {', '.join(names)})")
        lines += [f"  field {name} is read from column {column}" for name, column in mapping.items()]
        if first is not None:
            shown = first.reason if isinstance(first, BrokenLine) else json.dumps(first.value, ensure_ascii=False)
            more = "..." if len(shown) > _MOST_CHARACTERS else ""
            lines.append(f"  {rows.place(first.line)}: {shown[:_MOST_CHARACTERS]}{more}")
    return lines
