"""The sections of stages preference and reward_distill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from jaxalign.tracking.accuracy import uninformative
from jaxalign.tracking.formatting import accuracy_interval, number, percent
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import Curves, Figure, ReportSection, Table, curve_figures
from jaxalign.tracking.report.roles import rewards_rl
from jaxalign.tracking.workdir import RunFiles, StageFiles, read_object

_PREFERENCE_CURVES = (Curves("Loss", {"loss": "training", "held_out_loss": "held-out"}),
                      Curves("Accuracy", {"accuracy": "training", "held_out_accuracy": "held-out"}))


def preference(run: RunFiles) -> ReportSection:
    """The preference model's accuracy and calibration on held-out pairs, and its training curves."""
    title, stage = "The preference model", run.stage("preference")
    figures = curve_figures(run, "preference", _PREFERENCE_CURVES)
    if not stage.summary:
        missing = run.absence("preference", "the preference model's accuracy and calibration")
        return ReportSection("preference", title, missing=(missing,), figures=figures, nav="Preference model")
    purpose = "Its scores were the reward of RL, or a part of it. " if rewards_rl(run) else ""
    intro = f"{purpose}Calibration and held-out metrics use pairs that it was not trained on."
    if "early_stopping" in stage.summary:
        intro += (" The curves of the held-out loss and accuracy use other held-out pairs, which chose the step whose weights "
                  "are kept.")
    failure = uninformative(stage.summary) if "baselines" in stage.summary else None
    intro += f" Warning: {failure}." if failure else ""
    table = Table("Preference model statistics", ["Quantity", "Value"], _preference_rows(stage))
    figures = (*_calibration(stage), *figures)
    return ReportSection("preference", title, intro, figures=figures, tables=(table,), nav="Preference model")


def _calibration(stage: StageFiles) -> tuple[Figure, ...]:
    held_out, shape = stage.summary.get("held_out") or {}, stage.summary.get("calibration") or {}
    if not any(shape.get("count") or []):
        return ()
    ece = held_out.get("ece")
    note = "" if ece is None else f"Expected calibration error (ECE) {number(ece)}. "
    drawn = plots.calibration("Calibration", shape["edges"], shape["confidence"], shape["accuracy"], shape["count"])
    note += ("The dashed line marks perfect calibration. Each held-out pair is counted in both orders of its answers; "
             f"larger dots contain more of these {sum(shape['count']):,.0f} ordered pairs.")
    return (Figure("Calibration", Markup(drawn), note),)


def _preference_rows(stage: StageFiles) -> list[list[str]]:
    summary, held_out = stage.summary, stage.summary.get("held_out") or {}
    rows = [["Held-out pairs", number(held_out.get("pairs"))],
            ["Held-out accuracy", accuracy_interval(held_out)],
            *_baseline_rows(summary),
            ["Expected calibration error", number(held_out.get("ece"))],
            ["Held-out loss", number(held_out.get("loss"))],
            ["Mean score before normalisation", number(summary.get("reward_mean_before"))],
            ["Standard deviation before normalisation", number(summary.get("reward_std_before"))],
            ["Shift applied", number(summary.get("shift"))],
            ["Scale applied", number(summary.get("scale"))]]
    if "temperature" in summary:
        fitted = summary["temperature"] or {}
        rows += [["Fitted temperature", number(fitted.get("value"))],
                 ["Calibration error before the fit", number(fitted.get("ece_before"))]]
    if "members" in summary:
        rows += [[f"Accuracy of member {i}", accuracy_interval(member.get("held_out") or {})]
                 for i, member in enumerate(summary["members"] or [], 1)]
        rows.append(["Disagreement of the members", number(summary.get("disagreement"))])
    return rows


def _baseline_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The baselines, the accuracy on the parts of the pairs, and the result of early stopping, if the summary has them."""
    rows, baselines = [], summary.get("baselines")
    if baselines:
        length, ceiling = baselines.get("length") or {}, baselines.get("ceiling")
        rows += [["Accuracy of chance", percent(baselines["chance"])],
                 [f"Accuracy of choosing the {length.get('rule', 'longer')} answer", accuracy_interval(length)],
                 ["Expected accuracy that the noise of the labels allows", "-" if ceiling is None else percent(ceiling)]]
    for name, title in (("ai", "AI-labelled"), ("human", "human")):
        part = summary.get(name)
        if part:
            rows += [[f"Training pairs, {title}", number(part.get("train_pairs"))],
                     [f"Held-out pairs, {title}", number(part.get("held_out_pairs"))],
                     [f"Held-out accuracy, {title} pairs", accuracy_interval(part.get("held_out") or {})]]
    if summary.get("human"):
        rows.append(["Weight of a human pair", number(summary["human"].get("weight"))])
    members = (summary.get("early_stopping") or {}).get("members") or []
    for i, member in enumerate(members, 1):
        of = f", member {i}" if len(members) > 1 else ""
        rows += [[f"Step whose weights are kept{of}", f"{number(member.get('best_step'))} of {number(member.get('steps'))}"],
                 [f"Loss that chose this step{of}", number(member.get("held_out_loss"))]]
    return rows


_DISTILL_CURVES = (Curves("Loss", {"loss": "training"}), Curves("Agreement with the teacher", {"agreement": "training"}))


def distilled(run: RunFiles) -> ReportSection:
    """The agreement of the preference model's student with its teacher, and its speed."""
    title, summary = "The distilled reward model", run.stage("reward_distill").summary
    figures = curve_figures(run, "reward_distill", _DISTILL_CURVES)
    if not summary:
        missing = run.absence("reward_distill", "its agreement with its teacher")
        return ReportSection("reward_distill", title, missing=(missing,), figures=figures, nav="Distilled reward")
    intro = ("A smaller model, trained on the preference model's scores rather than on labels. All measurements use data that "
             "it was not trained on.")
    table = Table("Teacher and student", ["Quantity", "Value"], _distilled_rows(run, summary))
    return ReportSection("reward_distill", title, intro, figures=figures, tables=(table,), nav="Distilled reward")


def _distilled_rows(run: RunFiles, summary: Mapping[str, Any]) -> list[list[str]]:
    alike, speed = summary.get("agreement") or {}, read_object(run.path / "reward_distill" / "speed.json")
    labelled, parameters = summary.get("labelled") or {}, summary.get("parameters") or {}
    rows = [["Held-out pairs of new answers", number(alike.get("pairs"))],
            ["Pairs in the teacher's order", accuracy_interval({**alike, "accuracy": alike.get("rate")})],
            ["Pearson correlation of the scores", number(alike.get("pearson"))],
            ["Spearman correlation of the scores", number(alike.get("spearman"))],
            ["Teacher's accuracy on held-out labels", accuracy_interval(labelled.get("teacher") or {})],
            ["Student's accuracy on held-out labels", accuracy_interval(labelled.get("student") or {})],
            ["Teacher's parameters", number(parameters.get("teacher"))],
            ["Student's parameters", number(parameters.get("student"))]]
    if speed:
        rows += [["Sequences scored in one batch", f"{number(speed.get('rows'))} of {number(speed.get('width'))} tokens"],
                 ["Teacher's median time", f"{number(speed.get('teacher_seconds'))} s"],
                 ["Student's median time", f"{number(speed.get('student_seconds'))} s"],
                 ["Speed-up", number(speed.get("speedup"))]]
    return rows
