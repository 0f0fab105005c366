"""The columns of exported data sets, and how their rows are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError

Row = dict[str, Any]
Kind = dict[str, Any]
"""The type of a column, as `datasets` writes it in a card: {"dtype": name}, or {"list": name or list of named types}."""

_TEXT, _NUMBER, _TRUTH = {"dtype": "string"}, {"dtype": "float64"}, {"dtype": "bool"}
_TEXTS = {"list": "string"}
_MESSAGES = {"list": [{"name": "role", **_TEXT}, {"name": "content", **_TEXT}]}
VERDICTS = {"list": [
    {"name": name, **(_NUMBER if name in ("ab", "ba", "tie") else _TEXT)}
    for name in ("principle", "ab", "ba", "tie", "reasoning_ab", "reasoning_ba")
]}

Columns = dict[str, tuple[Kind, str]]
"""The type and the meaning of each column."""

_PROMPT_COLUMNS: Columns = {
    "prompt_id": (_TEXT, "the id of the prompt"),
    "source": (_TEXT, "the set of prompts that it belongs to"),
}
SFT: Columns = {
    "prompt": (_MESSAGES, "the dialogue up to the answer"),
    "completion": (_MESSAGES, "the answer to imitate"),
    "messages": (_MESSAGES, "the dialogue with the answer"),
    "round": ({"dtype": "int64"}, "the round of the revision; 0 for an answer that was not revised"),
    "principle": (_TEXT, "the principle of the revision, if any"),
    **_PROMPT_COLUMNS,
}
PREFERENCE: Columns = {
    "prompt": (_MESSAGES, "the dialogue up to the answers"),
    "chosen": (_MESSAGES, "the answer that is labelled better"),
    "rejected": (_MESSAGES, "the other answer"),
    "score_chosen": (_NUMBER, "the label: the probability that the chosen answer is better"),
    "score_rejected": (_NUMBER, "1 - score_chosen"),
    "principle": (_TEXT, "the principle that decided the label, if one did"),
    **_PROMPT_COLUMNS,
}
LABELS: Columns = {
    "messages": (_MESSAGES, "the dialogue up to the answers"),
    "response_a": (_TEXT, "the first answer"),
    "response_b": (_TEXT, "the second answer"),
    "label": (_NUMBER, "the probability that the first answer is better; 0.5 if it is undecided"),
    "decided": (_TRUTH, "whether the label is decided"),
    "outcome": (_TEXT, "why it is undecided"),
    "label_ab": (_NUMBER, "the label with the first answer shown first"),
    "label_ba": (_NUMBER, "the label with the first answer shown second"),
    "principles": (_TEXTS, "the principles under which the judge was asked"),
    "principle": (_TEXT, "the principle that decided the label, if one did"),
    "labels": (VERDICTS, "the verdicts under each principle"),
    "reasoning_ab": (_TEXT, "the judge's text before the verdict that decided, with the first answer shown first"),
    "reasoning_ba": (_TEXT, "the same with the first answer shown second"),
    "problem": (_TEXT, "why the judge gave no verdict"),
    "outside": (_NUMBER, "the probability that the judge gave to none of the options"),
    "notes": (_TEXTS, "facts about the verdicts that do not prevent their use"),
    "disagreement": (_NUMBER, "the largest difference between two members of a jury"),
    "incomplete": (_TEXTS, "the answers that did not end within the length limit: a, b"),
    "weight": (_NUMBER, "the weight of the pair's loss; empty: 1"),
    **_PROMPT_COLUMNS,
}


def columns_of(columns: Columns, plain: bool) -> Columns:
    """The columns of a set; in style "plain" a prompt and an answer are texts, and there is no dialogue."""
    if not plain:
        return columns
    return {name: (_TEXT if kind is _MESSAGES else kind, meaning) for name, (kind, meaning) in columns.items()
            if name != "messages"}


def _write_jsonl(path: Path, rows: Sequence[Row], kinds: Mapping[str, Kind]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _write_parquet(path: Path, rows: Sequence[Row], kinds: Mapping[str, Kind]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    def arrow(kind: Kind) -> Any:
        if "dtype" in kind:
            return {"string": pa.string(), "float64": pa.float64(), "bool": pa.bool_(), "int64": pa.int64()}[kind["dtype"]]
        if isinstance(kind["list"], str):
            return pa.list_(arrow({"dtype": kind["list"]}))
        return pa.list_(pa.struct([(entry["name"], arrow(entry)) for entry in kind["list"]]))

    schema = pa.schema([(name, arrow(kind)) for name, kind in kinds.items()])
    parquet.write_table(pa.Table.from_pylist(list(rows), schema), path)


Writer = Callable[[Path, Sequence[Row], Mapping[str, Kind]], None]

WRITERS: dict[str, Writer] = {"jsonl": _write_jsonl, "parquet": _write_parquet}
"""Writes the rows of a file in each format. Every row has all columns; the kinds are those of the columns."""


def require_pyarrow() -> None:
    """Raises UserError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("--format=parquet needs pyarrow, which is not installed; run pip install 'jaxalign[data]', or use "
                        "--format=jsonl") from None
