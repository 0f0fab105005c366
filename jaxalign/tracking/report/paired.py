"""Comparisons on the same prompts: win rates with bootstrap intervals and at equal lengths, diversity of the answers, and the
differences from the first model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.algorithms.win_rates import LEAST, RESAMPLES
from jaxalign.tracking.differences import MORE, WITHIN, Difference
from jaxalign.tracking.estimates import Compared
from jaxalign.tracking.formatting import capitalized, decimal, percent, rate_cell
from jaxalign.tracking.measures import measure, model_column, model_phrase, model_title, ordered_measures, quantities
from jaxalign.tracking.report.blocks import Table
from jaxalign.tracking.workdir import RunFiles

_PROBLEMS = {
    "few": f"unknown: fewer than {LEAST} prompts",
    "constant": "unknown: all pairs have the same outcome",
    "equal_lengths": "unknown: all pairs have the same difference in length",
    "separable": "unknown: the difference in length predicts every outcome",
}
_CHOICES = {"choices": "Correct choice, log-probability", "choices_per_token": "Correct choice, log-probability per token"}
_METHOD = f"95% percentile intervals of {RESAMPLES:,} resamples of the prompts"
_CAPTION = (f"Win rates on the same prompts, with {_METHOD}. The win rate at equal lengths is that of a logistic regression of "
            "the judge's preference on the difference in length, at a difference of 0 (AlpacaEval 2). A difference from a draw "
            "is more than noise if the interval does not contain 50%; for the win rate, Wilson's interval must not contain it "
            "either.")


def draw_note(row: Mapping[str, Any]) -> str:
    """Whether a win rate differs from a draw, as a sentence; empty for a run without bootstrap intervals."""
    return f"The difference from a draw is {_verdict(_raw_side(row))}." if "bootstrap_low" in row else ""


def length_sentences(run: RunFiles, compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each comparison whose conclusion is another one at equal lengths.

    Both conclusions are from bootstrap intervals, so that they cannot differ by the method.
    """
    sentences = []
    for row in compared:
        side = _controlled_side(row)
        if side is None or side in (_raw_side(row), _side(row["bootstrap_low"], row["bootstrap_high"])):
            continue
        model, against = (model_phrase(row[name], run.used) for name in ("model", "against"))
        meaning = f"the judge prefers {model if side > 0 else against} only at equal lengths"
        if side == 0:
            meaning = "the difference in length may explain the preference"
        elif _raw_side(row):
            meaning = "the preference is reversed"
        sentences.append(f"At equal lengths, {model} has a win rate of {_controlled(row)} against {against} instead of "
                         f"{percent(row['rate'])}, and the difference from a draw is {_verdict(side)}: {meaning}.")
    return sentences


def win_rate_tables(run: RunFiles, compared: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """A row for each two models; no table for a run without bootstrap intervals."""
    rows = []
    for row in compared:
        if "bootstrap_low" not in row:
            continue
        controlled, side = _PROBLEMS.get(row["length_controlled_problem"]), _controlled_side(row)
        interval = _bounds(row["bootstrap_low"], row["bootstrap_high"])
        rows.append([capitalized(f"{model_title(row['model'], run.used)} against {model_title(row['against'], run.used)}"),
                     f"{percent(row['rate'])}\n{interval}", _verdict(_raw_side(row)),
                     f"{row['length_difference']:+z.1f}", controlled or _controlled(row, "\n"),
                     "-" if side is None else _verdict(side)])
    header = ["Models", "Win rate", "Difference from a draw", "Difference in length, characters", "Win rate at equal lengths",
              "Difference from a draw at equal lengths"]
    return (Table(_CAPTION, header, rows),) if rows else ()


def distinct_rows(run: RunFiles) -> list[list[str]]:
    """The rows of distinct-n for the table of all models, as far as they are known."""
    of_model = run.evaluation.get("distinct") or {}
    lengths = dict.fromkeys(n for values in of_model.values() for n in values)
    return [[f"Distinct {n}-grams per word", *(decimal((of_model.get(model) or {}).get(n), 3) for model in run.models)]
            for n in lengths]


def choice_tables(run: RunFiles) -> tuple[Table, ...]:
    """The share of questions whose correct answer has the highest log-probability, in total and per token."""
    of_model = run.evaluation.get("choices") or {}
    rows = [[title, *(rate_cell((of_model.get(model) or {}).get(name)) for model in run.models)]
            for name, title in _CHOICES.items()]
    caption = "Questions with several answers, with 95% Wilson intervals. Nothing is sampled."
    header = ["Measure", *(model_column(model, run.used) for model in run.models)]
    return (Table(caption, header, rows),) if of_model else ()


def difference_tables(run: RunFiles) -> tuple[Table, ...]:
    """The difference of each model from the first one on the same prompts, in each measure."""
    of_model = run.evaluation.get("paired") or {}
    models = [model for model in run.models if of_model.get(model)]
    measures = {name: Compared(name, measure(name).title, True, (), measure(name).good) for name in ordered_measures(of_model)}
    measures["complete"] = Compared("complete", "Complete answers", True, ())
    measures |= {name: Compared(name, title, True, (), good=True) for name, title in _CHOICES.items()}
    measures |= {one.field: Compared(one.field, one.title, False, (), digits=one.digits)
                 for one in quantities(run.kl_reference)}
    rows = [[about.title, *(_difference_cell(about, of_model[model].get(name)) for model in models)]
            for name, about in measures.items() if any(name in of_model[model] for model in models)]
    if not rows:
        return ()
    caption = (f"Difference from {model_phrase(run.models[0], run.used)} on the same prompts, with {_METHOD}. It is more than "
               "noise if the interval does not contain 0.")
    return (Table(caption, ["Measure", *(model_column(model, run.used) for model in models)], rows),)


def _difference_cell(about: Compared, found: Mapping[str, Any] | None) -> str:
    if not found:
        return "-"
    low, high = (math.nan if found[end] is None else found[end] for end in ("low", "high"))
    return about.difference_words(Difference(found["difference"], low, high))


def _raw_side(row: Mapping[str, Any]) -> int:
    """1 or -1 if both intervals of the win rate are above or below a draw, else 0. The bootstrap has no width if all pairs have
    the same outcome; Wilson's interval is wider than necessary with ties."""
    sides = {_side(row["low"], row["high"]), _side(row["bootstrap_low"], row["bootstrap_high"])}
    return sides.pop() if len(sides) == 1 else 0


def _controlled_side(row: Mapping[str, Any]) -> int | None:
    """As `_raw_side`, for the rate at equal lengths; None if it is unknown."""
    if row.get("length_controlled") is None:
        return None
    return _side(row["length_controlled_low"], row["length_controlled_high"])


def _side(low: float, high: float) -> int:
    return 1 if low > 0.5 else -1 if high < 0.5 else 0


def _verdict(side: int) -> str:
    return MORE if side else WITHIN


def _controlled(row: Mapping[str, Any], separator: str = "") -> str:
    interval = _bounds(row["length_controlled_low"], row["length_controlled_high"])
    rate = percent(row["length_controlled"])
    return f"{rate}{separator}{interval}" if separator else f"{rate} (95% interval {interval})"


def _bounds(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"
