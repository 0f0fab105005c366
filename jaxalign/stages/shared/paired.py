"""Comparisons of evaluated models on the same prompts: win rates with intervals, and the differences of means from the first
model."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxalign.algorithms.texts import distinct_share, repeated_share
from jaxalign.algorithms.win_rates import mean_difference, paired_rates
from jaxalign.stages.shared.breakdown import Contest

DISTINCT = (1, 2, 3)
"""The lengths of n-grams of distinct-n."""
_FIELDS = {"length": "tokens", "complete": "complete", "kl": "kl", "preference_score": "score", "reward": "reward"}
Row = Mapping[str, Any]


def win_rates(contests: Sequence[Contest]) -> list[dict[str, Any]]:
    """The rows of "win_rates" in summary.json: `Contest.to_dict` with the fields of `algorithms.win_rates.PairedRates`."""
    rows = []
    for contest in contests:
        row, labelled = contest.to_dict(), contest.labelled
        # The outcomes are those of `trainers.evaluation.won`: equal answers and undecided pairs count one half.
        decided = [pair.decided and pair.response_a != pair.response_b for pair in labelled]
        outcomes = [float(pair.label > 0.5) if known else 0.5 for pair, known in zip(labelled, decided, strict=True)]
        differences = [len(pair.response_a) - len(pair.response_b) for pair in labelled]
        rows.append(row | dataclasses.asdict(paired_rates(outcomes, differences)))
    return rows


def word_measures(rows: Sequence[Row], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Repetition and diversity of each model's answers, whose words are the parts between white space.

    Args:
      rows: the rows of stage evaluate, one for each answer.
      names: the models.

    Returns:
      "repetition": {model: the mean share of repeated 4-grams in an answer}, and "distinct": {model: {n: distinct-n, None
      without a word}}.
    """
    texts = {name: [row["response"].split() for row in rows if row["model"] == name] for name in names}
    return {
        "repetition": {name: sum(map(repeated_share, own)) / len(own) for name, own in texts.items()},
        "distinct": {name: {str(n): distinct_share(own, n) for n in DISTINCT} for name, own in texts.items()},
    }


def paired_differences(
    rows: Sequence[Row], names: Sequence[str], kinds: Mapping[str, Sequence[str] | None]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The mean difference of each model from the first one, on the prompts for which both have the measure.

    Args:
      rows: the rows of stage evaluate, one for each answer.
      names: the models; each has answered all prompts.
      kinds: the measures of "gold" in the rows, and the kinds of prompts that each covers; None: all prompts.

    Returns:
      {model: {measure: the result of `mean_difference`}}, without the first model and measures that no prompt has.
    """
    measures: dict[str, Callable[[Row], Any]] = {
        **{name: _gold(name, covered) for name, covered in kinds.items()},
        **{name: operator.methodcaller("get", field) for name, field in _FIELDS.items()},
        "repetition": lambda row: repeated_share(row["response"].split()),
    }
    of_model = {name: {row["prompt_id"]: row for row in rows if row["model"] == name} for name in names}
    differences: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in names[1:]}
    for measure, value in measures.items():
        values = {name: {key: value(row) for key, row in own.items()} for name, own in of_model.items()}
        for name in names[1:]:
            pairs = [(own, values[names[0]][key]) for key, own in values[name].items()]
            known = [pair for pair in pairs if None not in pair]
            if known:
                differences[name][measure] = mean_difference(*zip(*known, strict=True))
    return differences


def merge(summary: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Adds fields to a summary. The differences of their "paired" join those of the summary."""
    differences = {name: own | fields.get("paired", {}).get(name, {}) for name, own in summary["paired"].items()}
    summary |= fields
    summary["paired"] = differences


def _gold(name: str, kinds: Sequence[str] | None) -> Callable[[Row], Any]:
    return lambda row: row["gold"][name] if kinds is None or row["kind"] in kinds else None
