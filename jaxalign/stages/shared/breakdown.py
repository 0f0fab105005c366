"""Breaks prompts down by their sources, and an evaluation by the columns of its prompts, such as a label "safe" or "unsafe"."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxalign.records import Comparison
from jaxalign.stages.shared.base import StageContext
from jaxalign.tracking.formatting import percent
from jaxalign.trainers.evaluation import won

RED_TEAM = "red_team"

MOST_VALUES = 12
"""The maximum number of values of a column by which results are broken down."""


class Contest(NamedTuple):
    """The labels of a later model's answers (`response_a`) against those of an earlier model, one for each prompt."""

    model: str
    against: str
    labelled: Sequence[Comparison]

    def to_dict(self) -> dict[str, Any]:
        """The names of the models, and the result of `won`."""
        return {"model": self.model, "against": self.against} | won(self.labelled)

    def rows(self) -> list[dict[str, Any]]:
        """The label of each prompt, for the agreement with people. Equal answers are not decided."""
        names = {"model": self.model, "against": self.against}
        return [{"prompt_id": pair.prompt.id, **names, "label": pair.label, "decided": pair.decided,
                 **({"problem": pair.problem} if pair.problem else {})} for pair in self.labelled]


def breakdown(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], contests: Sequence[Contest]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The results for the prompts of each value of each column that `grouping_columns` finds.

    Args:
      rows: the rows of stage evaluate, one for each answer.
      names: the models; each has answered all prompts.
      contests: the labelled comparisons of the models, over any of the prompts.

    Returns:
      {column: {value: results}} in the order of the rows. The results are "prompts" (their number), "length" (mean tokens),
      "complete" (share) and, if answers have scores, "preference_score" (mean), each by model, and "win_rates" as in
      `Contest.to_dict`, over the compared prompts of the value; empty if there are none.
    """
    columns = {row["prompt_id"]: row.get("columns", {}) for row in rows}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for column in grouping_columns(list(columns.values())):
        values, results[column] = {prompt_id: own[column] for prompt_id, own in columns.items()}, {}
        for value in dict.fromkeys(values.values()):
            part = [row for row in rows if values[row["prompt_id"]] == value]
            restricted = [
                contest._replace(labelled=[pair for pair in contest.labelled if values[pair.prompt.id] == value])
                for contest in contests
            ]
            results[column][value] = _results(part, names, restricted)
    return results


def grouping_columns(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the columns with 2 to `MOST_VALUES` different values, all of them strings.

    columns: the columns of each prompt.
    """
    names = [name for name in (columns[0] if columns else {}) if all(isinstance(own.get(name), str) for own in columns)]
    return [name for name in names if 2 <= len({own[name] for own in columns}) <= MOST_VALUES]


def _results(rows: Sequence[Mapping[str, Any]], names: Sequence[str], contests: Sequence[Contest]) -> dict[str, Any]:
    by_model = {name: [row for row in rows if row["model"] == name] for name in names}
    scored = all(row["score"] is not None for row in rows)
    return {
        "prompts": len(by_model[names[0]]),
        "length": means_by_model(by_model, "tokens"),
        "complete": means_by_model(by_model, "complete"),
        **({"preference_score": means_by_model(by_model, "score")} if scored else {}),
        "win_rates": [contest.to_dict() for contest in contests if contest.labelled],
    }


def means_by_model(by_model: Mapping[str, Sequence[Mapping[str, Any]]], field: str) -> dict[str, float]:
    """The mean of a field of each model's rows."""
    return {name: float(np.mean([row[field] for row in rows])) for name, rows in by_model.items()}


def prompt_shares(context: StageContext, row_sources: Iterable[str], unit: str = "prompts") -> dict[str, Any]:
    """The part of a stage's summary with the share of each source; prints it, with a warning if all are red-team prompts.

    Args:
      context: the stage's context.
      row_sources: the source of each prompt or row, such as "red_team" or "helpful".
      unit: the name of the rows in the sentence.
    """
    counts = collections.Counter(row_sources)
    total = sum(counts.values())
    shares = {source: count / total for source, count in sorted(counts.items())}
    listed = ", ".join(f"{percent(share)} {source}" for source, share in shares.items())
    print(f"[{context.title}] {total:,} {unit}: {listed}", flush=True)
    if set(counts) == {RED_TEAM}:
        print(f"[{context.title}] warning: all {total:,} {unit} are red-team prompts; a model that learns from no helpful "
              "prompts becomes evasive: set config.data.helpful to a file of prompts", flush=True)
    return {"prompt_shares": shares}
