"""The section that compares the rounds of a run (`config.rounds`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jaxalign.config.rounds import folder
from jaxalign.registry.stages import policy_makers
from jaxalign.tracking.estimates import MAIN
from jaxalign.tracking.formatting import decimal, number, percent, percent_interval
from jaxalign.tracking.measures import MEASURES, model_column, ordered_measures, quantities
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import FIRST, Figure, ReportSection, Table
from jaxalign.tracking.report.plots import Series
from jaxalign.tracking.workdir import RunFiles, StageFiles

Stages = Mapping[str, StageFiles]


def across_rounds(run: RunFiles) -> list[ReportSection]:
    """The labels, training and evaluation of every round side by side; no section for a run of one round."""
    if not run.by_round:
        return []
    names = ", ".join(run.by_round[1])
    intro = (f"Each of the {len(run.by_round)} rounds runs the stages {names}. Every round after the first starts from the "
             "policy of the round before it, which is also the reference of its KL. The sections on labels and training below "
             "describe the first round.")
    tables = tuple(table for table in (_training_table(run), _evaluation_table(run)) if table.rows)
    figures = tuple(_figures(run))
    return [ReportSection("rounds", "The rounds", intro, figures=figures, tables=tables, nav="Rounds", order=FIRST)]


def decided_share(stages: Stages) -> float | None:
    """The share of the pairs of stage compare that have a decided label; of online_dpo, if compare did not run."""
    compare, online = (stages[name].summary if name in stages else {} for name in ("compare", "online_dpo"))
    if compare.get("pairs"):
        return 1 - (compare["identical_pairs"] + compare["undecided"]) / compare["pairs"]
    return online["decided"] / online["pairs"] if online.get("pairs") else None


def _training_cells(stages: Stages) -> dict[str, str]:
    """The quantities of the stages of one round as text, by title."""
    names = ("compare", "online_dpo", "preference", "dpo", "ppo")
    compare, online, preference, dpo, ppo = (stages[name].summary if name in stages else {} for name in names)
    return {
        "Pairs": number(online.get("pairs") if compare.get("pairs") is None else compare["pairs"]),
        "Decided pairs": percent(decided_share(stages)),
        "Held-out accuracy of the preference model": _rate(preference.get("held_out") or {}),
        "Held-out accuracy of DPO": _rate(dpo.get("held_out") or {}),
        "Reward at the first iteration of RL": number(ppo.get("reward_first")),
        "Reward at the last iteration of RL": number(ppo.get("reward_last")),
        "KL to the start of the round, nats per response":
            number(online.get("kl_last") if ppo.get("kl_last") is None else ppo["kl_last"]),
    }


def _training_table(run: RunFiles) -> Table:
    """A row for each quantity of the stages that are repeated, and a column for each round."""
    columns = [_training_cells(stages) for stages in run.by_round.values()]
    rows = [[title, *(column[title] for column in columns)] for title in columns[0]]
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
    for quantity in quantities(run.kl_reference):
        means = evaluation.get(quantity.field) or {}
        if any(means.get(model) is not None for model in models):
            rows.append([quantity.title, *(decimal(means.get(model), quantity.digits) for model in models)])
    caption = "The evaluation of the model before the first round and of the last policy of each round, with 95% intervals."
    if evaluation.get("preference_score"):
        caption += " The preference score is that of the first round's preference model."
    return Table(caption, ["Measure", *(model_column(model, run.used) for model in models)], rows)


def measured_models(run: RunFiles) -> list[tuple[int, str]]:
    """(round, model of the evaluation): the model before the first round as round 0, then the last policy of each round."""
    repeated = list(run.by_round[1])
    last = [name for name in policy_makers(run.planned) if name in repeated][-1]
    models = [(0, run.start_of(repeated[0])), *((number, folder(last, number)) for number in run.by_round)]
    return [(number, model) for number, model in models if model in run.models]


def _figures(run: RunFiles) -> list[Figure]:
    """Shares of the labels and the preference model, then the main rates of the evaluation, by round."""
    decided, accuracies = [], []
    for index, stages in run.by_round.items():
        held_out = (stages["preference"].summary if "preference" in stages else {}).get("held_out") or {}
        decided.append((index, decided_share(stages)))
        accuracies.append((index, held_out.get("accuracy")))
    labels = {"Decided pairs": decided, "Accuracy of the preference model": accuracies}
    figures = _figure("Labels and preference model by round, shares", labels)
    evaluation, models = run.evaluation, measured_models(run)
    for name in MAIN:
        rates = [(number, ((evaluation.get("rates") or {}).get(model) or {}).get(name) or {}) for number, model in models]
        shares = [(number, rate["rate"] if rate.get("total") else None) for number, rate in rates]
        figures += _figure(f"{MEASURES[name].title}, share by round", {"share": shares})
    for quantity in quantities(run.kl_reference):
        means = evaluation.get(quantity.field) or {}
        if evaluation.get("kl") and quantity.field != "length":
            points = [(number, means.get(model)) for number, model in models]
            figures += _figure(f"{quantity.title} by round", {"mean": points})
    return figures


def _figure(title: str, curves: Mapping[str, Sequence[tuple[int, float | None]]]) -> list[Figure]:
    """A plot of each curve's known values by round; none if no curve has two of them."""
    series = []
    for name, points in curves.items():
        known = [(number, value) for number, value in points if value is not None]
        if len(known) > 1:
            series.append(Series(name, [number for number, _ in known], [value for _, value in known]))
    if not series:
        return []
    note = "Round 0 is the model before the first round." if 0 in series[0].xs else ""
    legend = tuple(curve.name for curve in series) if len(series) > 1 else ()
    return [Figure(title, Markup(plots.line_chart(title, series, "round")), note, legend)]


def _rate(rate: Mapping[str, Any]) -> str:
    """A rate or an accuracy, and below it its 95% interval, if it has one."""
    value = rate.get("rate", rate.get("accuracy"))
    if value is None or not rate.get("total", 1):
        return "-"
    return f"{percent(value)}\n{percent_interval(rate)}" if "low" in rate else percent(value)
