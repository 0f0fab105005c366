"""Tables of measured figures on the pages name a commit, or link to the results that do."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
UNIT = r"(?:s|ms|seconds|GB|MB|tokens/s)"
HEADER = re.compile(rf"(?:^|, ){UNIT}(?:$|:)")
CELL = re.compile(rf"^[\d.,]+ {UNIT}\b|^[\d.]+% (?:\(\d+/\d+\)|of \d+)")
SOURCE = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,8}\b|RESULTS\.md|benchmarks/results/")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def unnamed(text: str) -> list[str]:
    """The headers of tables of measured figures for which neither the section nor the page's opening names a commit."""
    opening, *sections = re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
    found = []
    for section in (opening, *sections):
        if SOURCE.search(section) or SOURCE.search(opening):
            continue
        for table in re.findall(r"(?:^ *\|.*\n)+", section, re.MULTILINE):
            header, _, *rows = table.splitlines()
            if any(map(HEADER.search, cells(header))) or any(CELL.search(cell) for row in rows for cell in cells(row)):
                found.append(header)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_of_measured_figures_name_a_commit(page):
    assert not unnamed(page.read_text(encoding="utf-8"))


def test_a_table_without_a_commit_is_found():
    table = "\n| devices | step, s |\n|---|---|\n| 1 | 2.5 |\n"
    assert unnamed(f"# A\n\n## B\n{table}") == ["| devices | step, s |"]
    assert not unnamed(f"# A\n\n## B\n\nCommit 1be1ea8.\n{table}") and not unnamed(f"# A\n\n[R](RESULTS.md)\n\n## B\n{table}")
    assert unnamed("## B\n| run | harmful |\n|---|---|\n| a | 1.6% (4/256) |\n")
    assert not unnamed("## B\n| limit | content |\n|---|---|\n| alarm | waits 60 s |\n")
