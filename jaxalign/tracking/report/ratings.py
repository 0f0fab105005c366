"""The section "Human ratings": win rates by rater and together, and the agreement with each other and with the models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from jaxalign.tracking.differences import MORE, WITHIN, Estimate
from jaxalign.tracking.formatting import capitalized, decimal, number, percent
from jaxalign.tracking.jsonl import read_rows
from jaxalign.tracking.measures import model_phrase, model_title
from jaxalign.tracking.ratings.measures import (
    VERDICTS,
    Better,
    agreement,
    judge_outcomes,
    majority,
    score_outcomes,
    win_rate,
)
from jaxalign.tracking.ratings.reading import FIRST as SHOWN_FIRST
from jaxalign.tracking.ratings.reading import SECOND, TIE
from jaxalign.tracking.ratings.sheet import answers_of
from jaxalign.tracking.ratings.stored import Rated, stored_ratings
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import FIRST, Figure, ReportSection, Table
from jaxalign.tracking.report.plots import Interval
from jaxalign.tracking.report.roles import joined
from jaxalign.tracking.workdir import RunFiles

TOGETHER = "All raters"
_JUDGE, _SCORES = "the judge", "the preference model"


def human_ratings(run: RunFiles) -> list[ReportSection]:
    """The section; none if no ratings have been imported."""
    stored = stored_ratings(run.path)
    if not stored:
        return []
    answers = answers_of(run)
    current = [rated for rated in stored if rated.belongs(answers)]
    verdicts = read_rows(run.path / "evaluate" / VERDICTS)
    intro, figures, tables, missing = [], [], [], []
    for models in dict.fromkeys(rated.models for rated in current):
        group = [rated for rated in current if rated.models == models]
        better: dict[str, dict[str, str | None]] = {}
        for rated in group:  # A later sheet replaces the outcomes of an earlier one for the same prompt.
            better.setdefault(rated.rater, {}).update(rated.better)
        intro.append(rates_sentence(run, models, better))
        figures.append(_figure(run, models, better))
        tables.append(_raters(run, models, group, better))
        others = {_JUDGE: judge_outcomes(verdicts, models), _SCORES: score_outcomes(answers, models)}
        tables += _agreements(better, {name: outcomes for name, outcomes in others.items() if outcomes})
        if verdicts and not any(prompt_id in others[_JUDGE] for own in better.values() for prompt_id in own):
            missing.append(f"The judge has no verdict on the rated pairs of {models[0]} and {models[1]}.")
    missing += [f"The ratings of sheet {rated.sheet} by {rated.rater} are left out, because stage evaluate has written other "
               "answers since; export a new sheet." for rated in stored if rated not in current]
    if current and run.evaluation.get("win_rates") and not verdicts:
        missing.append(f"The run has no evaluate/{VERDICTS} with the judge's verdict on each pair, so the agreement with the "
                       "judge is unknown; stage evaluate of this version writes the file.")
    return [ReportSection("human-ratings", "Human ratings", " ".join(intro), tuple(missing), tuple(figures), tuple(tables),
                          nav="Human ratings", order=FIRST)]


def rates_sentence(run: RunFiles, models: tuple[str, str], better: Mapping[str, Better]) -> str:
    """Who rated how many pairs, and the win rate with its interval and its meaning. better: by rater."""
    earlier, later = (model_phrase(model, run.used) for model in models)
    rate = win_rate(list(better.values()), models[1])
    people = f"{len(better)} people ({joined(list(better))})" if len(better) > 1 else next(iter(better))
    sentence = (f"{people} rated {rate.total:,} pairs of answers of {earlier} and {later}, without the models' names and in "
                f"random order. {capitalized(later)} has a win rate of {percent(rate.value)} (95% interval "
                f"{_interval(rate)}; a tie counts as half a win). The difference from a draw is {_verdict(rate)}")
    side = "better" if rate.low > 0.5 else "worse"
    return sentence + (f": people find its answers {side}." if _verdict(rate) == MORE else
                       ": these ratings do not show which model is better.")


def _verdict(rate: Estimate) -> str:
    return MORE if rate.low > 0.5 or rate.high < 0.5 else WITHIN


def _figure(run: RunFiles, models: tuple[str, str], better: Mapping[str, Better]) -> Figure:
    name = f"{model_title(models[1], run.used)} against {model_title(models[0], run.used)}"
    rates = [(rater, win_rate([own], models[1])) for rater, own in better.items()]
    bars = [Interval(rater, rate.value, rate.low, rate.high, f"{number(rate.count)} of {rate.total:,}")
            for rater, rate in rates]
    if len(rates) > 1:
        rate = win_rate(list(better.values()), models[1])
        bars.append(Interval(TOGETHER, rate.value, rate.low, rate.high, f"{rate.total:,} pairs", 1))
    note = "A tie counts as half a win. The dashed line marks a draw; whiskers show 95% intervals."
    return Figure(capitalized(name), Markup(plots.interval_bars(f"Win rate of the model {name}", bars, reference=0.5)), note)


def _raters(run: RunFiles, models: tuple[str, str], group: Sequence[Rated], better: Mapping[str, Better]) -> Table:
    rows = []
    for rater, own in better.items():
        wins = [sum(winner == model for winner in own.values()) for model in models]
        sheets = [rated for rated in group if rated.rater == rater]
        counts = {rating: sum(rated.count(rating) for rated in sheets) for rating in (SHOWN_FIRST, SECOND, TIE, None)}
        decided = counts[SHOWN_FIRST] + counts[SECOND]
        rows.append([rater, number(len(own)), number(wins[1]), number(wins[0]), number(len(own) - sum(wins)),
                     *_rate_cells([own], models[1]), percent(counts[SHOWN_FIRST] / decided if decided else None),
                     number(counts[None])])
    if len(better) > 1:
        every = list(better.values())
        rows.append([TOGETHER, number(win_rate(every, models[1]).total), "", "", "", *_rate_cells(every, models[1]), "", ""])
    earlier, later = (capitalized(model_title(model, run.used)) for model in models)
    header = ["Rater", "Pairs", f"{later} is better", f"{earlier} is better", "Ties", "Win rate", "Difference from a draw",
              "Chose the first answer", "Not rated"]
    caption = "Ratings by person. "
    if len(better) > 1:
        caption += "A pair that several people rated counts once in the last row, with the mean of its ratings. "
    return Table(f"{caption}Without a preference for a position, the first answer is chosen in about 50%.", header, rows)


def _rate_cells(better: Sequence[Better], model: str) -> list[str]:
    rate = win_rate(better, model)
    return [f"{percent(rate.value)}\n{_interval(rate)}", _verdict(rate)]


def _agreements(better: Mapping[str, Better], others: Mapping[str, Better]) -> list[Table]:
    """A table of the agreement of each two raters, and of each rater and of their majority with the judge and the scores."""
    pairings = list(itertools.combinations(better.items(), 2))
    people = dict(better)
    if len(better) > 1:
        people["the majority"] = majority(list(better.values()))
    pairings += list(itertools.product(people.items(), others.items()))
    rows = []
    for (first, own), (second, other) in pairings:
        agreed = agreement(own, other)
        if agreed is None:
            continue
        kappa = agreed.kappa
        shown = "-" if kappa is None else decimal(kappa.value, 2)
        if kappa is not None and math.isfinite(kappa.low):
            shown += f"\n{decimal(kappa.low, 2)} to {decimal(kappa.high, 2)}"
        rows.append([capitalized(f"{first} and {second}"), number(agreed.same.total), _share(agreed.same), shown,
                     _share(agreed.decided)])
    header = ["Between", "Pairs", "Same outcome", "Cohen's kappa", "Same model, where neither sees a tie"]
    caption = ("Agreement on the pairs that both rated, with 95% intervals. The outcome is one of the models or a tie. Kappa "
               "is the agreement above chance: 0 is chance, 1 is complete.")
    return [Table(caption, header, rows)] if rows else []


def _share(rate: Estimate) -> str:
    return f"{percent(rate.value)} ({number(rate.count)}/{rate.total:,})\n{_interval(rate)}" if rate.total else "-"


def _interval(rate: Estimate) -> str:
    return f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
