"""The parts of a card in Markdown, and its front matter in YAML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxalign.errors import shown


def cell(value: Any) -> str:
    """A value as the text of a table's cell, on one line."""
    text = shown(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))
    return text.replace("|", "\\|").replace("<", "&lt;")


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table, with an empty line after it; no lines without rows."""
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *lines, ""] if lines else []


def section(title: str, *parts: Iterable[str]) -> list[str]:
    """A section with its lines; no lines if all parts are empty."""
    lines = [line for part in parts for line in part]
    return [f"## {title}", "", *lines] + ([""] if lines[-1] else []) if lines else []


def front_matter(fields: Mapping[str, Any]) -> list[str]:
    """The YAML block at the beginning of a card. Values are written as JSON, which YAML contains; empty ones are left out."""
    lines = ["---"]
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            lines.append(f"{name}:")
            for item in value:
                pairs = [f"{key}: {json.dumps(entry, ensure_ascii=False)}" for key, entry in item.items()]
                lines += [f"{'  ' if number else '- '}{pair}" for number, pair in enumerate(pairs)]
        elif value:
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    return [*lines, "---", ""]
