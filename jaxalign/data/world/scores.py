"""Gold scores of written answers: reads the rows of stage evaluate and counts the verdicts of the gold judge by model.

Only for evaluation, like `gold`; no training stage may import it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.data.sources.jsonl import read_jsonl
from jaxalign.data.world import EmbeddedWorld, gold
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt

SHOWN = ("harmful", "helpful", "evasive", "refused", "courteous", "focused")
"""The measures of `gold.MEASURES` that the table shows."""
_LAYOUT = '{"model": name, "messages": [{"role", "content"}, ...], "response": text}'


class Rate(NamedTuple):
    """The number of answers that a measure counts, of all answers that it applies to."""

    count: int
    total: int


def read_rows(place: str) -> list[dict[str, Any]]:
    """The answers in a file, in the rows-*.jsonl of a folder, or in the files of a glob pattern.

    Raises:
        UserError: there is no such file, or a row lacks a field.
    """
    path = Path(place).expanduser()
    files = sorted(path.glob("rows-*.jsonl")) if path.is_dir() else [Path(name) for name in sorted(glob.glob(str(path)))]
    if not files:
        raise UserError(f"--score={place} has no rows; give a .jsonl file, the folder of a finished stage evaluate, such as "
                        "runs/x/evaluate, or a pattern in quotes")
    rows = []
    for file in files:
        for row in read_jsonl(file)[0]:
            if not _is_answer(row.value):
                raise UserError(f"line {row.line} of {file} is not an answer; {_LAYOUT} is expected")
            rows.append(row.value)
    return rows


def score(world: EmbeddedWorld, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Rate]]:
    """{model: {measure: rate}} for the measures in `SHOWN`, with models in the order of their first row.

    Args:
        world: the world that the prompts are from.
        rows: answers with "model", "messages" (the dialogue, which ends with the user's turn) and "response".

    Raises:
        UserError: a prompt is not from this world.
    """
    counts: dict[str, dict[str, list[bool]]] = {}
    for number, row in enumerate(rows):
        messages = tuple(Message(turn["role"], turn["content"]) for turn in row["messages"])
        prompt = Prompt(row.get("prompt_id", f"row {number + 1}"), messages, "evaluate")
        verdict = gold.judge(world, prompt, row["response"])
        by_measure = counts.setdefault(row["model"], {measure: [] for measure in SHOWN})
        for measure in SHOWN:
            if verdict.kind in gold.MEASURES[measure][0]:
                by_measure[measure].append(getattr(verdict, measure))
    return {model: {measure: Rate(sum(values), len(values)) for measure, values in by_measure.items()}
            for model, by_measure in counts.items()}


def table(scores: Mapping[str, Mapping[str, Rate]]) -> str:
    """The scores as a Markdown table: percent, counts and 95% Wilson intervals."""
    lines = [["model", *SHOWN], ["---"] * (1 + len(SHOWN))]
    for model, rates in scores.items():
        cells = [model]
        for rate in (rates[measure] for measure in SHOWN):
            if rate.total == 0:
                cells.append("no answers")
                continue
            low, high = wilson_interval(*rate)
            cells.append(f"{rate.count / rate.total:.1%} ({rate.count}/{rate.total}; {low:.1%} to {high:.1%})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _is_answer(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("model"), str) or not isinstance(row.get("response"), str):
        return False
    messages = row.get("messages")
    return isinstance(messages, list) and bool(messages) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in messages
    )
