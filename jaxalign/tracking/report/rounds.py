"""The section that compares the rounds of a run (`config.rounds`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jaxalign.config.rounds import folder
from jaxalign.registry.stages import policy_makers
from jaxalign.tracking.formatting import decimal, number, percent, percent_interval
from jaxalign.tracking.measures import MEASURES, model_column, ordered_measures, quantities
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import FIRST, Figure, Section, Table
from jaxalign.tracking.report.headlines import MAIN
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles, StageFiles

Stages = Mapping[str, StageFiles]


def across_rounds(run: RunFiles) -> list[Section]:
    """The labels, training and evaluation of every round side by side; no section for a run of one round."""
    if not run.by_round:
        return []
    names = ", ".join(run.by_round[1])
    intro = (f"Each of the {len(run.by_round)} rounds runs the stages {names}. Every round after the first starts from the "
             "policy of the round before it, which is also the reference of its KL. The sections on labels and training below "
             "describe the first round.")
    tables = tuple(table for table in (_training_table(run), _evaluation_table(run)) if table.rows)
    return [Section("rounds", "The rounds", intro, figures=tuple(_figures(run)), tables=tables, nav="Rounds", order=FIRST)]


def decided_share(stages: Stages) -> float | None:
    """The share of the pairs of stage compare that have a decided label; of online_dpo, if compare did not run."""
    summary = _summary(stages, "compare")
    if summary.get("pairs"):
        return 1 - (summary["identical_pairs"] + summary["undecided"]) / summary["pairs"]
    summary = _summary(stages, "online_dpo")
    return summary["decided"] / summary["pairs"] if summary.get("pairs") else None


def accuracy(stages: Stages) -> Mapping[str, Any]:
    """The preference model's accuracy on held-out pairs, with its interval; empty without one."""
    return _summary(stages, "preference").get("held_out") or {}


def _summary(stages: Stages, name: str) -> Mapping[str, Any]:
    return stages[name].summary if name in stages else {}


def _first_known(stages: Stages, *fields: tuple[str, str]) -> Any:
    """The first (stage, field of its summary) with a value; None if all are missing."""
    values = (_summary(stages, name).get(field) for name, field in fields)
    return next((value for value in values if value is not None), None)


def _training_table(run: RunFiles) -> Table:
    """A row for each quantity of the stages that are repeated, and a column for each round."""
    shown: tuple[tuple[str, Callable[[Stages], str]], ...] = (
        ("Pairs", lambda stages: number(_first_known(stages, ("compare", "pairs"), ("online_dpo", "pairs")))),
        ("Decided pairs", lambda stages: _percent(decided_share(stages))),
        ("Held-out accuracy of the preference model", lambda stages: _rate(accuracy(stages))),
        ("Held-out accuracy of DPO", lambda stages: _rate(_summary(stages, "dpo").get("held_out") or {})),
        ("Reward at the first iteration of RL", lambda stages: number(_first_known(stages, ("ppo", "reward_first")))),
        ("Reward at the last iteration of RL", lambda stages: number(_first_known(stages, ("ppo", "reward_last")))),
        ("KL to the start of the round, nats per response",
         lambda stages: number(_first_known(stages, ("ppo", "kl_last"), ("online_dpo", "kl_last")))),
    )
    rows = [[title, *map(cell, run.by_round.values())] for title, cell in shown]
    caption = ("Labels and training of each round. Rewards of different rounds come from different preference models, and "
               "cannot be compared." if "preference" in run.by_round[1] else "Labels and training of each round.")
    return Table(caption, ["Quantity", *(f"Round {number}" for number in run.by_round)],
                 [row for row in rows if any(cell != "-" for cell in row[1:])])


def _evaluation_table(run: RunFiles) -> Table:
    """A row for each measure of the evaluation, and a column for the start and for the last policy of each round."""
    models = [model for _, model in measured_models(run)]
    evaluation, rows = run.evaluation, []
    rates = evaluation.get("rates") or {}
    for name in ordered_measures(rates):
        title = MEASURES[name].title if name in MEASURES else name
        rows.append([title, *(_rate((rates.get(model) or {}).get(name) or {}) for model in models)])
    wins = {(row["model"], row["against"]): row for row in evaluation.get("win_rates") or [] if row.get("total")}
    for before, after in zip(models, models[1:], strict=False):
        if (after, before) in wins:
            cells = [_rate(wins[after, before]) if model == after else "-" for model in models]
            rows.append([f"Win rate against {before}", *cells])
    for quantity in quantities(run.models):
        means = evaluation.get(quantity.field) or {}
        if any(means.get(model) is not None for model in models):
            rows.append([quantity.title, *(decimal(means.get(model), quantity.digits) for model in models)])
    caption = "The evaluation of the model before the first round and of the last policy of each round, with 95% intervals."
    if evaluation.get("preference_score"):
        caption += " The preference score is that of the first round's preference model."
    return Table(caption, ["Measure", *(model_column(model, run.planned) for model in models)], rows)


def measured_models(run: RunFiles) -> list[tuple[int, str]]:
    """(round, model of the evaluation): the model before the first round as round 0, then the last policy of each round."""
    repeated = list(run.by_round[1])
    last = [name for name in policy_makers(run.planned) if name in repeated][-1]
    models = [(0, run.start_of(repeated[0])), *((number, folder(last, number)) for number in run.by_round)]
    return [(number, model) for number, model in models if model in run.models]


def _figures(run: RunFiles) -> list[Figure]:
    """Shares of the labels and the preference model, then the main rates of the evaluation, by round."""
    training = {"Decided pairs": decided_share, "Accuracy of the preference model": lambda s: accuracy(s).get("accuracy")}
    curves = [_series(name, [(k, value(stages)) for k, stages in run.by_round.items()]) for name, value in training.items()]
    figures = [_figure("Labels and preference model by round, shares", curves)]
    rates, models = run.evaluation.get("rates") or {}, measured_models(run)

    def points(measure: str) -> list[tuple[int, float | None]]:
        found = [(k, (rates.get(model) or {}).get(measure) or {}) for k, model in models]
        return [(k, rate["rate"] if rate.get("total") else None) for k, rate in found]

    figures += [_figure(f"{MEASURES[name].title}, share by round", [_series("share", points(name))]) for name in MAIN]
    kl = run.evaluation.get("kl") or {}
    for quantity in quantities(run.models):
        means = run.evaluation.get(quantity.field) or {}
        if kl and quantity.field != "length":
            figures.append(_figure(f"{quantity.title} by round", [_series("mean", [(k, means.get(m)) for k, m in models])]))
    return [figure for figure in figures if figure is not None]


def _series(name: str, points: Sequence[tuple[int, float | None]]) -> Series:
    known = [(k, value) for k, value in points if value is not None]
    return Series(name, [k for k, _ in known], [value for _, value in known])


def _figure(title: str, curves: Sequence[Series]) -> Figure | None:
    """A plot by round; None if no curve has two points."""
    shown = [curve for curve in curves if len(curve.xs) > 1]
    if not shown:
        return None
    drawn = Markup(plots.line_chart(title, shown, "round"))
    return Figure(title, drawn, "Round 0 is the model before the first round." if 0 in shown[0].xs else "",
                  tuple(curve.name for curve in shown) if len(shown) > 1 else ())


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _rate(rate: Mapping[str, Any]) -> str:
    """A rate or an accuracy, and below it its 95% interval, if it has one."""
    value = rate.get("rate", rate.get("accuracy"))
    if value is None or not rate.get("total", 1):
        return "-"
    return f"{percent(value)}\n{percent_interval(rate)}" if "low" in rate else percent(value)
