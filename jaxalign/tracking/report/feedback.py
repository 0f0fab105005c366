"""The sections of stages revise and compare, critiques with revisions and AI labels, and of the audit of the judge."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from jaxalign.reasons import COMPARISON, NOTES, PROBLEMS, REVISION, gold_labels_sentence, incomplete_answers
from jaxalign.tracking import judge_audit
from jaxalign.tracking.formatting import capitalized, number, percent, share, short_percent
from jaxalign.tracking.report import examples, plots
from jaxalign.tracking.report.blocks import Figure, ReportSection, Table
from jaxalign.tracking.report.roles import judge_phrase
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_REVISED, _LABELLED = 4, 3


def revisions(run: RunFiles) -> ReportSection:
    """The outcomes of the revisions, and the first revised prompts with their rounds of critique and revision."""
    title, rows = "Critiques and revisions", list(run.rows("revise"))
    if not rows:
        return ReportSection("revisions", title, missing=(run.absence("revise", "critiques and revisions"),), nav="Revisions")
    rounds = [f"Round {number} changed {changed:,} of {total:,} answers ({short_percent(changed / total)})."
              for number, changed, total in examples.rewritten_by_round(rows)]
    prompts, summary = examples.revised_prompts(rows, _REVISED), run.stage("revise").summary
    judge = judge_phrase(run, "revise")
    critic = "it criticises the answer under a randomly drawn principle and revises it" if judge == "the base model" else \
        f"{judge} criticises the answer under a randomly drawn principle and revises it"
    below = [f"Below are the first {len(prompts)} prompts."] if prompts else []
    intro = " ".join([f"The base model answers; {critic}.", *rounds, *below])
    remarks = functools.partial(examples.outcome_tags, outcomes=REVISION)
    body = render("revisions.html.j2", prompts=prompts, remarks=remarks)
    tables = tuple(_outcome_table(summary, len(rows)))
    return ReportSection("revisions", title, intro, tables=tables, body=body, nav="Revisions")


def _outcome_table(summary: Mapping[str, Any], total: int) -> list[Table]:
    """Why answers and revisions are not ordinary, and notes on their texts; no table if the summary counts neither."""
    rows, usable = [], summary.get("usable") or {}
    if usable:
        rows.append(["Can be trained on", share(usable["usable"], usable["total"]), "of the rows that sft.rounds_used selects"])
    for field, meanings in (("outcomes", REVISION), ("notes", NOTES)):
        rows += [[name, share(count, total), meanings.get(name, "")] for name, count in (summary.get(field) or {}).items()]
    return [Table(f"Outcomes of {total:,} answers and revisions", ["Outcome", "Rows", "Meaning"], rows)] if rows else []


def labels(run: RunFiles) -> ReportSection:
    """The judge's confidence, its biases, the reasons for pairs without a label, and the first comparisons."""
    title, summary = "AI labels", run.stage("compare").summary
    pairs = examples.labelled_pairs(run.rows("compare"), _LABELLED)
    body = render("labelled.html.j2", pairs=pairs) if pairs else Markup("")
    if not summary:
        return ReportSection("labels", title, missing=(run.absence("compare", "the labels"),), body=body, nav="Labels")
    figures = []
    shape = summary.get("confidence_histogram") or {}
    if any(shape.get("counts") or []):
        name = "Confidence of the labels"
        drawn = plots.histogram(name, shape["edges"], shape["counts"], "probability of the preferred answer")
        figures.append(Figure(name, Markup(drawn), "At 1 the judge is certain; at 0.5 it is undecided."))
    tables = [Table("The judge", ["Quantity", "Value", "Meaning"], _judge_rows(summary))]
    principles = summary.get("principles") or {}
    if principles:
        tables.append(Table("By principle", ["Principle", "Pairs with verdicts", "Labels decided", "Ties",
                                             "Same verdict in both orders", "Position bias", "Mean confidence"],
                            [[name, number(row.get("pairs")), number(row.get("decides")), percent(row.get("ties")),
                              percent(row.get("order_agreement")), _bias(row.get("position_bias")),
                              number(row.get("mean_confidence"))] for name, row in principles.items()]))
    gold = (run.evaluation or {}).get("labels")
    judge = capitalized(judge_phrase(run, "compare"))
    intro = f"{judge} compared two answers to each prompt under each principle drawn for it."
    intro += f" {capitalized(gold_labels_sentence(gold))}." if gold else ""
    return ReportSection("labels", title, intro, figures=tuple(figures), tables=tuple(tables), body=body, nav="Labels")


def _judge_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    total, agreement, outside = (summary.get(name) for name in ("pairs", "order_agreement", "outside_mass"))
    outcomes = summary.get("outcomes") or {}
    problems = {name: count for name, count in outcomes.items() if name not in ("identical", "undecided")}
    rows = [["Pairs", number(total), "two answers to each prompt"],
            ["Identical answers", share(summary.get("identical_pairs"), total), "these pairs are not compared"],
            ["Undecided", share(outcomes.get("undecided", 0), total), COMPARISON["undecided"]],
            *([name, share(count, total), COMPARISON.get(name, "")] for name, count in problems.items()),
            *(["Missing verdicts", share(count, summary["requests"]), f"{name}: {PROBLEMS[name]}"]
              for name, count in (summary.get("problems") or {}).items()),
            ["Same verdict in both orders", percent(agreement),
             "the share of verdicts in both orders for which the judge prefers the same answer whichever is shown first"],
            ["Position bias", _bias(summary.get("position_bias")),
             "how far the mean probability of the answer shown first is from 50%; averaging both orders cancels it"]]
    if summary.get("incomplete") is not None:
        rows.append(["Answers that did not end", share(*incomplete_answers(summary)),
                     "of the compared answers; training treats them as complete"])
    rows += _calibration_rows(summary.get("calibration") or {})
    if outside is not None:
        rows.append(["Outside mass", percent(outside),
                     "the mean probability of a text that is none of the options (docs/labels.md)"])
    if summary.get("disagreement") is not None:
        rows.append(["Disagreement of the jury", percent(summary["disagreement"]),
                     "the mean of the largest difference between two members' labels"])
    return rows


def _calibration_rows(calibration: Mapping[str, Any]) -> list[list[str]]:
    """How labels were decided: the margin, the share of chance decisions, and the correction of the position bias."""
    if not calibration:
        return []
    shift = (calibration.get("position") or {}).get("")
    return [["Margin", number(calibration.get("margin")), "a label is decided if it differs from 0.5 by more"],
            ["Due to chance", percent(calibration.get("chance_share")),
             "the share of decided labels that is expected by chance, estimated from contradictions between the two orders"],
            ["Correction of the position bias", "-" if shift is None else f"{-shift:+z.2f}",
             "added to the log-odds of the answer shown first before labels are decided"]]


def _bias(bias: float | None) -> str:
    if bias is None:
        return "-"
    place = "first" if bias >= 0 else "second"
    return f"{100 * abs(bias):.1f} points towards the answer shown {place}"


def audit(run: RunFiles) -> list[ReportSection]:
    """The section on the audit of the judge (`jaxalign.judge_audit`); none if the work directory has no audit."""
    content = run.audit
    if not content:
        return []
    rows = [[*row, judge_audit.MEANINGS[row[0]]] for row in judge_audit.measures(content)]
    header = ["Measure", *(name.capitalize() for name in judge_audit.names(content)), "Meaning"]
    tables = [Table("The judge on gold pairs, with 95% intervals", header, rows)]
    members = content.get("members") or ()
    if members:
        listed = [[f"member {number}", member["judge"]] for number, member in enumerate(members, start=1)]
        tables.append(Table("Members of the jury", ["Name", "Model"], listed))
    for field, title, first in (("principles", "Audit by principle", "Principle"), ("kinds", "Audit by kind of pair", "Kind")):
        if parts := content["audit"][field]:
            tables.append(Table(title, [first, *judge_audit.PARTS_HEADER], judge_audit.parts(parts)))
    intro = " ".join(filter(None, (judge_audit.introduction(content), judge_audit.problem_sentence(content["audit"]))))
    return [ReportSection("audit", "The judge's audit", intro, tables=tuple(tables), nav="Audit")]
