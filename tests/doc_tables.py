"""The tables of a Markdown page."""

from __future__ import annotations

import re


def tables(text: str):
    """The rows of every table, each a dictionary from column heading to cell."""
    for block in re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines())
        assert all(len(row) == len(head) for row in rows), f"rows of the table {head} have other numbers of cells"
        yield [dict(zip(head, row, strict=True)) for row in rows]
