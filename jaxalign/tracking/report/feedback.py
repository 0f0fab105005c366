"""The sections of stages revise and compare: critiques with revisions, and AI labels."""

from __future__ import annotations

from markupsafe import Markup

from jaxalign.tracking.formatting import number, percent, share, short_percent
from jaxalign.tracking.report import examples, plots
from jaxalign.tracking.report.blocks import Figure, Section, Table
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.workdir import RunFiles

_REVISED, _LABELLED = 4, 3


def revisions(run: RunFiles) -> Section:
    """The first revised prompts, with their rounds of critique and revision."""
    title, rows = "Critiques and revisions", list(run.rows("revise"))
    if not rows:
        return Section("revisions", title, missing=(run.absence("revise", "critiques and revisions"),), nav="Revisions")
    rounds = [f"Round {number} changed {changed:,} of {total:,} answers ({short_percent(changed / total)})."
              for number, changed, total in examples.rewritten_by_round(rows)]
    body = render("revisions.html.j2", prompts=examples.revised_prompts(rows, _REVISED), rounds=rounds)
    return Section("revisions", title, body=body, nav="Revisions")


def labels(run: RunFiles) -> Section:
    """The labeller's confidence, its position bias, the agreement between the two orders, and the first comparisons."""
    title, summary = "AI labels", run.stage("compare").summary
    pairs = examples.labelled_pairs(run.rows("compare"), _LABELLED)
    body = render("labelled.html.j2", pairs=pairs) if pairs else Markup("")
    if not summary:
        return Section("labels", title, missing=(run.absence("compare", "the labels"),), body=body, nav="Labels")
    figures = []
    shape = summary.get("confidence_histogram") or {}
    if shape.get("counts"):
        name = "Confidence of the labels"
        drawn = plots.histogram(name, shape["edges"], shape["counts"], "probability of the preferred answer")
        figures.append(Figure(name, Markup(drawn), "At 1 the labeller is certain; at 0.5 it is undecided."))
    total, agreement, bias = (summary.get(name) for name in ("pairs", "order_agreement", "position_bias"))
    rows = [["Pairs", number(total)],
            ["Identical answers", share(summary.get("identical_pairs"), total)],
            ["Undecided", share(summary.get("undecided"), total)],
            ["Unreadable judgements", share(summary.get("unparsable"), total)],
            ["Same verdict in both orders", "-" if agreement is None else percent(agreement)],
            ["Position bias", "-" if bias is None else f"{100 * bias:+.1f} points towards the answer shown first"]]
    tables = [Table("Label statistics", ["Quantity", "Value"], rows)]
    principles = summary.get("principles") or {}
    if principles:
        tables.append(Table("By principle", ["Principle", "Pairs", "Mean confidence"],
                            [[name, number(row.get("pairs")), number(row.get("mean_confidence"))]
                             for name, row in principles.items()]))
    intro = "The labeller compared two answers to each prompt under a principle, in both orders."
    return Section("labels", title, intro, figures=tuple(figures), tables=tuple(tables), body=body, nav="Labels")
