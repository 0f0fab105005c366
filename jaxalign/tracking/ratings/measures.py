"""Win rates by people's ratings, and the agreement of people with each other, with the judge and with the preference model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.algorithms.statistics import bootstrap_interval, kappa_of_counts, wilson_interval
from jaxalign.tracking.differences import Estimate
from jaxalign.tracking.ratings.sheet import Answers

VERDICTS = "win_rates.jsonl"
"""The file of stage evaluate with the judge's label of each pair."""
Better = Mapping[str, str | None]
"""The model with the better answer by prompt; None for a tie."""


def win_rate(better: Sequence[Better], model: str) -> Estimate:
    """How often a model's answer is better; a tie counts one half.

    A prompt counts once, with the mean over its raters, since ratings of the same answers are not independent. The interval is
    Wilson's for the number of prompts; with ties or several raters it is wider than necessary.

    Args:
      better: that of each rater, over any prompts.
      model: one of the two models.

    Returns:
      The rate over N prompts, with `count` the sum of their means and `total` N.
    """
    scores: dict[str, list[float]] = {}
    for own in better:
        for prompt_id, winner in own.items():
            scores.setdefault(prompt_id, []).append(0.5 if winner is None else float(winner == model))
    count, total = sum(sum(own) / len(own) for own in scores.values()), len(scores)
    count = min(count, float(total))  # A sum of thirds may exceed a whole number by rounding.
    return Estimate(count / total if total else 0.5, *wilson_interval(count, total), count, total)


def majority(better: Sequence[Better]) -> dict[str, str | None]:
    """The model that more raters prefer, by prompt; None if equally many prefer each."""
    votes: dict[str, list[str | None]] = {}
    for own in better:
        for prompt_id, winner in own.items():
            votes.setdefault(prompt_id, []).append(winner)
    decided = {prompt_id: [winner for winner in own if winner is not None] for prompt_id, own in votes.items()}
    winners = {}
    for prompt_id, own in decided.items():
        counts = {winner: own.count(winner) for winner in own}
        most = [winner for winner, count in counts.items() if count == max(counts.values())]
        winners[prompt_id] = most[0] if len(most) == 1 else None
    return winners


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The agreement of two raters on the prompts that both rated.

    Attributes:
      same: the share of these prompts with the same outcome (either model, or a tie), with Wilson's interval.
      decided: the share of the prompts on which neither sees a tie, with Wilson's interval.
      kappa: Cohen's kappa of the three outcomes, with its bootstrap interval; None if it is undefined.
    """

    same: Estimate
    decided: Estimate
    kappa: Estimate | None


def agreement(first: Better, second: Better) -> Agreement | None:
    """The agreement of two raters; None if they rated no common prompt."""
    common = [prompt_id for prompt_id in first if prompt_id in second]
    if not common:
        return None
    outcomes = [(first[prompt_id], second[prompt_id]) for prompt_id in common]
    index = {winner: i for i, winner in enumerate({winner: None for pair in outcomes for winner in pair})}
    cells = np.asarray([index[a] * len(index) + index[b] for a, b in outcomes])

    def kappa(rows: np.ndarray) -> float | None:
        return kappa_of_counts(np.bincount(cells[rows], minlength=len(index) ** 2).reshape(len(index), len(index)))

    value = kappa(np.arange(len(cells)))
    interval = None if value is None else bootstrap_interval(kappa, len(outcomes))
    return Agreement(_same(outcomes), _same([pair for pair in outcomes if None not in pair]),
                     None if value is None else Estimate(value, *(interval or (float("nan"), float("nan"))), None, len(common)))


def judge_outcomes(verdicts: Sequence[Mapping[str, Any]], models: tuple[str, str]) -> dict[str, str | None]:
    """The judge's outcomes for two models.

    Args:
      verdicts: the rows of evaluate/win_rates.jsonl. A pair without a verdict is left out.
      models: the earlier and the later model.
    """
    earlier, later = models
    rows = [row for row in verdicts if (row["model"], row["against"]) == (later, earlier) and not row.get("problem")]
    return {row["prompt_id"]: None if not row["decided"] else later if row["label"] > 0.5 else earlier for row in rows}


def score_outcomes(answers: Answers, models: tuple[str, str]) -> dict[str, str | None]:
    """The model whose answer the preference model scores higher, by prompt; empty without scores."""
    earlier, later = models
    outcomes: dict[str, str | None] = {}
    for (model, prompt_id), row in answers.items():
        score, other = row.get("score"), answers.get((later, prompt_id), {}).get("score")
        if model == earlier and score is not None and other is not None:
            outcomes[prompt_id] = None if score == other else later if other > score else earlier
    return outcomes


def _same(outcomes: Sequence[tuple[str | None, str | None]]) -> Estimate:
    count, total = sum(a == b for a, b in outcomes), len(outcomes)
    return Estimate(count / total if total else 0.0, *wilson_interval(count, total), count, total)
