"""The report's sections on behaviour and feedback: rates, win rates, AI labels, preference model.

A section whose stage is missing or unfinished still stands, with one sentence that says why it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from jaxalign.tracking.formatting import capitalized, number, percent, share
from jaxalign.tracking.measures import measure, model_title, ordered_measures
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import Curves, Figure, Section, Table, curve_figures
from jaxalign.tracking.report.plots import Interval
from jaxalign.tracking.report.prose import NO_GOLD
from jaxalign.tracking.workdir import RunFiles


def behaviour(run: RunFiles) -> Section:
    """The gold rates by stage with their intervals, then KL, length and score."""
    title, evaluation = "How the models behave", run.evaluation
    if not evaluation:
        return Section("behaviour", title, missing=(run.absence("evaluate", "the rates by stage"),))
    figures, rows = [], []
    for name in ordered_measures(evaluation.get("rates") or {}):
        bars = _rate_bars(run, name)
        if bars:
            drawn = plots.interval_bars(measure(name).title, bars)
            figures.append(Figure(measure(name).title, Markup(drawn), _side(name)))
        rows.append([measure(name).title, *map(_rate_cell, _rates(run, name))])
    for field, label in (("kl", "KL (nats a response)"), ("length", "Length (tokens)"),
                         ("preference_score", "Preference score")):
        values = [(evaluation.get(field) or {}).get(model) for model in run.models]
        if any(value is not None for value in values):
            rows.append([label, *map(number, values)])
    header = ["Measure", *(model_title(model, run.planned) for model in run.models)]
    caption = "Rates with 95% Wilson intervals. " if figures else ""
    caption += "KL is against the model that RL started from."
    prompts = sum((evaluation.get("prompts") or {}).values())
    intro = f"Each model answered the same {prompts:,} prompts. " if prompts else ""
    if figures:
        intro += "A bar is a rate, its whisker the 95% interval."
    return Section("behaviour", title, intro, () if figures else (NO_GOLD,), tuple(figures),
                   (Table(caption, header, rows),) if rows else ())


def win_rates(run: RunFiles) -> Section:
    """How often the labeller preferred one model's answers over another's."""
    title = "Which answers the labeller prefers"
    found = [row for row in run.evaluation.get("win_rates") or [] if row.get("total")]
    if not found:
        return Section("wins", title, missing=(run.absence("evaluate", "win rates"),))
    figures = []
    for row in found:
        name = f"{model_title(row['model'], run.planned)} against {model_title(row['against'], run.planned)}"
        note = f"{number(row['wins'])} of {row['total']:,}"
        bar = Interval("preferred", row["rate"], row["low"], row["high"], note, 1)
        undecided = row.get("undecided")
        ties = "" if undecided is None else f"{number(undecided)} undecided, each counted as half a win."
        figures.append(Figure(capitalized(name), Markup(plots.interval_bars(name, [bar], reference=0.5)), ties))
    intro = "The labeller saw both orders of each pair. The dashed line is a draw, the whisker the 95% interval."
    return Section("wins", title, intro, figures=tuple(figures))


def labels(run: RunFiles) -> Section:
    """What the labeller's preferences look like: confidence, position bias, agreement of the two orders."""
    title, summary = "The AI labels", run.stage("compare").summary
    if not summary:
        return Section("labels", title, missing=(run.absence("compare", "the labels"),))
    figures = []
    shape = summary.get("confidence_histogram") or {}
    if shape.get("counts"):
        name = "Confidence of the labels"
        drawn = plots.histogram(name, shape["edges"], shape["counts"], "probability of the answer it prefers")
        figures.append(Figure(name, Markup(drawn), "At 1 the labeller is certain; at 0.5 it could not tell."))
    pairs, agreement, bias = (summary.get(name) for name in ("pairs", "order_agreement", "position_bias"))
    rows = [["Pairs", number(pairs)],
            ["Identical answers", share(summary.get("identical_pairs"), pairs)],
            ["Undecided", share(summary.get("undecided"), pairs)],
            ["Unreadable judgements", share(summary.get("unparsable"), pairs)],
            ["Same verdict in both orders", "-" if agreement is None else percent(agreement)],
            ["Position bias", "-" if bias is None else f"{100 * bias:+.1f} points towards the answer shown first"]]
    tables = [Table("The labels in numbers", ["What", "Value"], rows)]
    principles = summary.get("principles") or {}
    if principles:
        tables.append(Table("By principle", ["Principle", "Pairs", "Mean confidence"],
                            [[name, number(row.get("pairs")), number(row.get("mean_confidence"))]
                             for name, row in principles.items()]))
    return Section("labels", title, "Two answers to each prompt, judged under a principle with either one shown first.",
                   figures=tuple(figures), tables=tuple(tables))


_PREFERENCE_CURVES = (Curves("Loss", {"loss": "training", "held_out_loss": "held-out"}),
                      Curves("Accuracy", {"accuracy": "training", "held_out_accuracy": "held-out"}))


def preference(run: RunFiles) -> Section:
    """Whether the preference model can be trusted: held-out accuracy, and its probabilities against the outcomes."""
    title, stage = "The preference model", run.stage("preference")
    summary, figures = stage.summary, curve_figures(run, "preference", _PREFERENCE_CURVES)
    if not summary:
        missing = run.absence("preference", "the preference model's accuracy and calibration")
        return Section("preference", title, missing=(missing,), figures=figures)
    held_out, shape = summary.get("held_out") or {}, summary.get("calibration") or {}
    if any(shape.get("count") or []):
        ece = held_out.get("ece")
        note = "" if ece is None else f"Expected calibration error (ECE) {number(ece)}. "
        drawn = plots.calibration("Calibration", shape["edges"], shape["confidence"], shape["accuracy"], shape["count"])
        note += "The dashed line is perfect; larger dots hold more pairs."
        figures = (Figure("Calibration", Markup(drawn), note), *figures)
    rows = [["Held-out pairs", number(held_out.get("pairs"))],
            ["Held-out accuracy", _accuracy(held_out)],
            ["Expected calibration error", number(held_out.get("ece"))],
            ["Held-out loss", number(held_out.get("loss"))],
            ["Mean reward before centring", number(summary.get("reward_mean_before"))],
            ["Its standard deviation", number(summary.get("reward_std_before"))],
            ["Shift applied", number(summary.get("shift"))],
            ["Scale applied", number(summary.get("scale"))]]
    if "temperature" in summary:
        fitted = summary["temperature"]
        rows += [["Temperature fitted", number(fitted.get("value"))],
                 ["Calibration error without it", number(fitted.get("ece_before"))]]
    if "members" in summary:
        rows += [[f"Accuracy of member {i}", _accuracy(member.get("held_out") or {})]
                 for i, member in enumerate(summary["members"], 1)]
        rows.append(["Disagreement of the members", number(summary.get("disagreement"))])
    intro = ("It turns the labels into the reward of RL. Calibration and held-out numbers are on pairs that it never "
             "trained on.")
    return Section("preference", title, intro, figures=figures,
                   tables=(Table("The preference model in numbers", ["What", "Value"], rows),))


_DISTILL_CURVES = (Curves("Loss", {"loss": "training"}), Curves("Agreement with the teacher", {"agreement": "training"}))


def distilled(run: RunFiles) -> list[Section]:
    """How well and how fast the student of the preference model scores; nothing for a run without one."""
    if "reward_distill" not in run.planned:
        return []
    title, summary = "The distilled reward model", run.stage("reward_distill").summary
    figures = curve_figures(run, "reward_distill", _DISTILL_CURVES)
    if not summary:
        missing = run.absence("reward_distill", "how it agrees with its teacher")
        return [Section("reward_distill", title, missing=(missing,), figures=figures)]
    alike, speed = summary.get("agreement") or {}, run.content("reward_distill", "speed.json")
    labelled, parameters = summary.get("labelled") or {}, summary.get("parameters") or {}
    rows = [["Held-out pairs of fresh answers", number(alike.get("pairs"))],
            ["Ordered as the teacher orders them", _accuracy({**alike, "accuracy": alike.get("rate")})],
            ["Correlation of the scores (Pearson)", number(alike.get("pearson"))],
            ["Correlation of their ranks (Spearman)", number(alike.get("spearman"))],
            ["Teacher's accuracy on held-out labels", _accuracy(labelled.get("teacher") or {})],
            ["Student's accuracy on them", _accuracy(labelled.get("student") or {})],
            ["Teacher's parameters", number(parameters.get("teacher"))],
            ["Student's parameters", number(parameters.get("student"))]]
    if speed:
        rows += [["Sequences scored at once", f"{number(speed.get('rows'))} of {number(speed.get('width'))} tokens"],
                 ["Teacher's median time", f"{number(speed.get('teacher_seconds'))} s"],
                 ["Student's median time", f"{number(speed.get('student_seconds'))} s"],
                 ["Times as fast", number(speed.get("speedup"))]]
    intro = "A smaller model that learnt the preference model's scores and saw no label. What is measured it never learnt from."
    return [Section("reward_distill", title, intro, figures=figures,
                    tables=(Table("Teacher and student", ["What", "Value"], rows),))]


def _rates(run: RunFiles, name: str) -> list[Mapping[str, Any]]:
    """The measure's rate of every model, in their order; empty where there is none."""
    rates = run.evaluation.get("rates") or {}
    return [(rates.get(model) or {}).get(name) or {} for model in run.models]


def _rate_bars(run: RunFiles, name: str) -> list[Interval]:
    return [Interval(model_title(model, run.planned), rate["rate"], rate["low"], rate["high"],
                     f"{rate['count']:,} of {rate['total']:,}", tone)
            for tone, (model, rate) in enumerate(zip(run.models, _rates(run, name), strict=True)) if rate.get("total")]


def _rate_cell(rate: Mapping[str, Any]) -> str:
    if not rate.get("total"):
        return "-"
    return (f"{percent(rate['rate'])} ({rate['count']:,}/{rate['total']:,})\n"
            f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}")


def _side(name: str) -> str:
    about = measure(name)
    side = {True: "More is better", False: "Less is better"}.get(about.good, "")
    return ": ".join(part for part in (side, about.meaning) if part)


def _accuracy(held_out: Mapping[str, Any]) -> str:
    accuracy, low, high = (held_out.get(name) for name in ("accuracy", "low", "high"))
    if accuracy is None:
        return "-"
    interval = "" if low is None or high is None else f" (95% interval {percent(low)} to {percent(high)})"
    return percent(accuracy) + interval
