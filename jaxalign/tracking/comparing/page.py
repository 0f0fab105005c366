"""Renders a comparison of runs as one HTML file, like the report: no scripts, nothing to load."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from jaxalign.errors import UserError
from jaxalign.storage import write_atomically
from jaxalign.tracking.alerts import alerts_of
from jaxalign.tracking.comparing.runs import (
    ComparedRun,
    affects_results,
    file_differences,
    output_hashes,
    read_runs,
    setting_differences,
)
from jaxalign.tracking.differences import Difference, Estimate
from jaxalign.tracking.estimates import MAIN_MEASURES, Compared, compared_measures
from jaxalign.tracking.formatting import number, seconds, span
from jaxalign.tracking.measures import measure, model_title
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import Figure, ReportSection, Table
from jaxalign.tracking.report.examples import KIND_TITLES, Tag, answered_prompts
from jaxalign.tracking.report.page import CONTROL
from jaxalign.tracking.report.plots import Interval, Series
from jaxalign.tracking.report.roles import joined
from jaxalign.tracking.report.templating import render

_FEW = 6  # Settings named in the opening.
_HASH = 8  # Characters shown of a hash.
_EXAMPLES = 12
_MAIN = {"loss": "Loss", "held_out_loss": "Held-out loss", "score": "Score", "reward": "Reward", "kl_full": "KL, full",
         "kl_k3": "KL (k3), nats per response", "kl": "KL, nats per response", "response_length": "Response length, tokens",
         "length": "Response length, tokens", "entropy": "Entropy, nats per token", "accuracy": "Accuracy", "margin": "Margin",
         "grad_norm": "Gradient norm"}
_NO_CURVE = ("step", "tokens", "skipped", "overflowed")


def render_comparison(workdirs: Sequence[str | Path], target: Path) -> list[str]:
    """Writes the page, replacing it atomically.

    Args:
      workdirs: the work directories of 2 to 6 runs, finished or not. The first one is the one to which the others are compared.
      target: the HTML file.

    Returns:
      A sentence for each run that is left out because its files cannot be read.

    Raises:
      UserError: fewer than two runs can be read, or the page cannot be written.
    """
    runs, problems = read_runs(workdirs)
    try:
        every = (rates(runs), *alerts(runs), settings(runs), data(runs),
                 *curves(runs), answers(runs), times(runs))
        page = render("comparison.html.j2", names=[run.name for run in runs], problems=problems, lead=lead(runs),
                      sections=[section for section in every if section.filled or section.missing])
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"the runs cannot be compared, because a file of a stage has another form than expected "
                        f"({type(error).__name__}: {error}); leave out one run after the other to find it") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, CONTROL.sub("\ufffd", page))
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); give another file as --out") from None
    return problems


def lead(runs: Sequence[ComparedRun]) -> list[str]:
    """The opening: what differs between the runs, and which differences of results are more than noise."""
    names = [name for name in setting_differences(runs) if affects_results(name)]
    listed = joined([*names[:_FEW], *([f"{len(names) - _FEW} more"] if len(names) > _FEW else [])])
    sentences = [f"The runs differ in {len(names)} settings on which results can depend: {listed}." if len(names) > 1 else
                 f"The runs differ in one setting on which results can depend: {listed}." if names else
                 "All settings on which results can depend are the same."]
    measures = [one for one in compared_measures([run.evaluated for run in runs]) if one.name in MAIN_MEASURES]
    for index, run in enumerate(runs[1:], 1):
        pairs = [(one, one.differences()[index]) for one in measures]
        known = [(one, difference) for one, difference in pairs if difference is not None]
        clear = [f"{one.title.lower()} {one.difference_words(difference)}" for one, difference in known
                 if difference.clear]
        rest = [one.title.lower() for one, difference in known if not difference.clear and difference.value]
        if known:
            parts = [f"{'; '.join(clear)}"] if clear else []
            parts += [f"the differences in {joined(rest)} are within noise"] if rest else []
            found = "; ".join(parts) or "no difference in the main measures"
            sentences.append(f"{run.name} against {runs[0].name}: {found}.")
    unfinished = [run.name for run in runs if any(files.status != "done" for files in run.files.runs.values())]
    if unfinished:
        sentences.append(f"Not finished: {joined(unfinished)}.")
    return sentences


def settings(runs: Sequence[ComparedRun]) -> ReportSection:
    """The settings that differ: those on which results depend, then the others."""
    differences = setting_differences(runs)
    header = ["Setting", *(run.name for run in runs)]
    tables = []
    for caption, kept in (("Settings on which results can depend", True), ("Other settings", False)):
        rows = [[f"config.{name}", *values] for name, values in differences.items() if affects_results(name) == kept]
        tables += [Table(f"{caption}, one row for each that differs.", header, rows)] if rows else []
    same = () if tables else ("All settings are the same.",)
    return ReportSection("settings", "Settings that differ", missing=same, tables=tuple(tables), nav="Settings")


def data(runs: Sequence[ComparedRun]) -> ReportSection:
    """The files that the runs read, and the stages whose results must be the same."""
    header = ["", *(run.name for run in runs), "Same"]
    tables = []
    for title, name, hashes in (
        ("Hashes of the files that the runs read.", "File", file_differences(runs)),
        ("Marks of the stages. Runs with the same mark of a stage had the same settings, files and inputs for it, so its "
         "results are the same on the same kind of machine.", "Stage", output_hashes(runs)),
    ):
        rows = []
        for key, values in hashes.items():
            same = Tag("same", "good") if len(set(values)) == 1 else Tag("different", "plain")
            rows += [[key, *(value[:_HASH] for value in values), same]] if set(values) != {"-"} else []
        tables += [Table(title, [name, *header[1:]], rows)] if rows else []
    return ReportSection("data", "Data and stages", tables=tuple(tables), nav="Data")


def rates(runs: Sequence[ComparedRun]) -> ReportSection:
    """Rates and means of the last models with intervals, and whether the differences are more than noise."""
    title, measures = "Rates and means of the last models", compared_measures([run.evaluated for run in runs])
    if not measures:
        return ReportSection("rates", title, missing=("None of the runs has an evaluation.",), nav="Rates")
    figures = []
    for one in measures:
        if one.share:
            bars = [Interval(f"{run.name}: {model_title(run.model, run.files.used)}", estimate.value, estimate.low,
                             estimate.high, f"{number(estimate.count)} of {estimate.total:,}", tone)
                    for tone, (run, estimate) in enumerate(zip(runs, one.estimates, strict=True), 1) if estimate is not None]
            reference = 0.5 if one.name == "win_rate" else None
            side = {True: "Higher is better", False: "Lower is better"}.get(one.good, "")
            note = ": ".join(part for part in (side, measure(one.name).meaning) if part)
            figures.append(Figure(one.title, Markup(plots.interval_bars(one.title, bars, reference)), note))
    rows = [[one.title, *(_cell(one, *pair) for pair in zip(one.estimates, one.differences(), strict=True))]
            for one in measures]
    caption = (f"Below each number is its 95% interval, and below that the difference from {runs[0].name} with the 95% "
               "interval of the difference. “More than noise” means that this interval does not contain 0. The intervals treat "
               "the answers of two runs as independent; if the runs answered the same prompts, they are too wide rather than "
               "too narrow. They do not contain the noise between seeds.")
    models = [f"{run.name}: {model_title(run.model, run.files.used)}" for run in runs if run.model]
    keys = [frozenset(map(_key, run.answers)) for run in runs if run.answers]
    other = "" if len(set(keys)) <= 1 else (f" The runs answered different prompts, {len(frozenset.intersection(*keys)):,} of "
                                            "which all runs answered: differences may come from the prompts.")
    return ReportSection("rates", title, f"Compared are the last models: {'; '.join(models)}.{other}", (), tuple(figures),
                         (Table(caption, ["Measure", *(run.name for run in runs)], rows),), nav="Rates")


def _cell(one: Compared, estimate: Estimate | None, difference: Difference | None) -> str:
    words = [] if difference is None else [one.difference_words(difference)]
    return "\n".join([one.cell(estimate), *words])


def curves(runs: Sequence[ComparedRun]) -> list[ReportSection]:
    """The metrics of each stage that trains, with a curve for each run."""
    stages = dict.fromkeys(label for run in runs for label, files in run.files.runs.items() if files.metrics)
    return [_curves(runs, stage) for stage in stages]


def _curves(runs: Sequence[ComparedRun], stage: str) -> ReportSection:
    files = [run.files.runs.get(stage) for run in runs]
    present = {name for one in files if one for row in one.metrics for name in row} - set(_NO_CURVE)
    figures, extra = [], []
    for name in [name for name in _MAIN if name in present] + sorted(present - _MAIN.keys()):
        columns = [one.column(name) if one else ([], []) for one in files]
        pairs = [[(x, y) for x, y in zip(*column, strict=True) if math.isfinite(y)] for column in columns]
        series = [Series(run.name, [x for x, _ in points], [y for _, y in points])
                  for run, points in zip(runs, pairs, strict=True)]
        if any(pairs):
            title = _MAIN.get(name, name.replace("_", " ").replace("/", ": ").capitalize())
            ends = (f"{one.name} {' → '.join(span([one.ys[0], one.ys[-1]]))}" for one in series if one.ys)
            figure = Figure(title, Markup(plots.line_chart(title, series)), "; ".join(ends), tuple(run.name for run in runs))
            (figures if name in _MAIN else extra).append(figure)
    without = [run.name for run, one in zip(runs, files, strict=True) if not one or not one.metrics]
    missing = (f"Without this stage, or without its metrics: {', '.join(without)}.",) if without else ()
    return ReportSection(f"curves-{stage.replace(', ', '-').replace(' ', '-')}", f"Curves of stage {stage}", missing=missing,
                         figures=tuple(figures), extra=tuple(extra), nav=stage)


def answers(runs: Sequence[ComparedRun]) -> ReportSection:
    """The first prompts that all evaluated runs answered, with each run's answer."""
    title = "The same prompts answered by each run"
    evaluated = [run for run in runs if run.answers]
    keys = [dict.fromkeys(map(_key, run.answers)) for run in evaluated]
    common = [key for key in keys[0] if all(key in others for others in keys)] if len(evaluated) > 1 else []
    if not common:
        reason = ("Fewer than two runs have answers of stage evaluate." if len(evaluated) < 2 else
                  "No prompt was answered by all evaluated runs.")
        return ReportSection("answers", title, missing=(reason,), nav="Answers")
    place = {key: index for index, key in enumerate(common)}
    rows = [row | {"model": run.name, "prompt_id": _key(row)} for run in evaluated for row in run.answers if _key(row) in place]
    rows.sort(key=lambda row: place[row["prompt_id"]])
    each = math.ceil(_EXAMPLES / len({row.get("kind") for row in rows}))
    groups = answered_prompts(rows, [run.name for run in evaluated], each)
    titled = [(KIND_TITLES.get(kind or "", (kind or "prompts").replace("_", " ").capitalize()), prompts)
              for kind, prompts in groups.items()]
    body = render("compared_answers.html.j2", groups=titled, names=[run.name for run in evaluated],
                  tones=[runs.index(run) + 1 for run in evaluated])
    intro = f"{len(common):,} prompts were answered by all of {', '.join(run.name for run in evaluated)}. These are the first."
    return ReportSection("answers", title, intro, body=body, nav="Answers")


def _key(row) -> str:
    return json.dumps(row["messages"], sort_keys=True)


def times(runs: Sequence[ComparedRun]) -> ReportSection:
    """The time of each stage in each run, and its tokens per second."""
    stages = dict.fromkeys(label for run in runs for label, files in run.files.runs.items() if files.timing)
    rows = []
    for stage in stages:
        cells = []
        for run in runs:
            phases = run.files.runs[stage].timing if stage in run.files.runs else {}
            spent = sum(phase["seconds"] for phase in phases.values())
            rated = [phase for name, phase in phases.items() if name not in ("start", "first step")]
            tokens, rest = (sum(phase[field] for phase in rated) for field in ("tokens", "seconds"))
            rate = f"\n{tokens / rest:,.0f} tokens/s" if tokens and rest else ""
            cells.append(f"{seconds(spent)}{rate}" if phases else "-")
        rows.append([stage, *cells])
    if not rows:
        return ReportSection("time", "Time", missing=("No stage has recorded its time.",))
    caption = "Wall-clock time over all starts, and tokens per second without the start and the first step of a stage."
    return ReportSection("time", "Time", tables=(Table(caption, ["Stage", *(run.name for run in runs)], rows),))


def alerts(runs: Sequence[ComparedRun]) -> list[ReportSection]:
    """The alerts of all runs; no section without any."""
    rows = [[run.name, stage, f"{alert.step:,}", f"{alert.sentence[:1].upper()}{alert.sentence[1:]}."]
            for run in runs for stage, files in run.files.runs.items()
            for alert in alerts_of(row for row in files.metrics if "step" in row)]
    table = Table("Signs of trouble in the metrics (docs/watching.md).", ["Run", "Stage", "Step", "Alert"], rows)
    return [ReportSection("alerts", "Alerts", tables=(table,))] if rows else []
