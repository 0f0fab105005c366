"""The sections on the time and tokens of all stages, and on the requests to the server of `config.endpoint`."""

from __future__ import annotations

from markupsafe import Markup

from jaxalign.tracking.formatting import seconds
from jaxalign.tracking.report import plots
from jaxalign.tracking.report.blocks import LAST, Figure, ReportSection, Table
from jaxalign.tracking.requests import FIELD, HEADER, amount, row, total
from jaxalign.tracking.timing import PhaseTotal
from jaxalign.tracking.workdir import RunFiles


def costs(run: RunFiles) -> ReportSection:
    """Time and tokens by stage and phase."""
    title = "Time and tokens"
    stages = {**run.stages, **run.runs}
    timed = {name: stage.timing for name, stage in stages.items() if stage.timing}
    if not timed:
        return ReportSection("time", title, missing=("No stage has recorded its time yet.",), nav="Time", order=LAST)
    totals = {name: sum(phase["seconds"] for phase in timing.values()) for name, timing in timed.items()}
    rows = []
    for name, timing in timed.items():
        phases = [(f"{name}:" if len(timing) > 1 else name, phase, cost) for phase, cost in timing.items()]
        if len(timing) > 1:  # A row for the stage precedes those of its phases. Their operations cannot be added up.
            tokens = sum(phase["tokens"] for phase in timing.values())
            whole = PhaseTotal(seconds=totals[name], tokens=tokens, flops=0.0, peak=0.0, runs=0, since=0.0)
            phases.insert(0, (name, "all", whole))
        for label, phase, cost in phases:
            spent, tokens, rate = cost["seconds"], cost["tokens"], cost["flops"] / max(cost["seconds"], 1e-9)
            rows.append([label, phase, seconds(spent), f"{tokens:,}" if tokens else "-",
                         f"{tokens / spent:,.0f}" if tokens and spent > 0 else "-", f"{rate / 1e12:.3g}" if rate else "-",
                         f"{rate / cost['peak']:.1%}" if rate and cost["peak"] else "-"])
    figure = Figure("Time by stage", Markup(plots.time_bars("Time by stage", list(totals.items()))),
                    f"{seconds(sum(totals.values()))} in total.")
    table = Table("Wall-clock time and tokens over all starts of the run. TFLOP/s count the operations that the models need, "
                  "excluding recomputation and padding. The peak is the vendor's figure for the devices.",
                  ["Stage", "Phase", "Time", "Tokens", "Tokens per second", "TFLOP/s", "Fraction of peak"], rows)
    first = [[name, seconds(timing["first step"]["since"])] for name, timing in timed.items()
             if timing.get("first step", {}).get("since")]
    waited = (Table("Time from the last start to the end of the first step", ["Stage", "Time"], first),) if first else ()
    chosen = [f"Stage {name}: {stage.choice.rstrip('.')}." for name, stage in stages.items() if stage.choice]
    return ReportSection("time", title, " ".join(chosen), figures=(figure,), tables=(table, *waited), nav="Time", order=LAST)


def requests(run: RunFiles) -> list[ReportSection]:
    """The requests, tokens and money of each stage; no section if no finished stage asked a server."""
    counts = {name: stage.summary[FIELD] for name, stage in run.runs.items() if stage.summary.get(FIELD)}
    if not counts:
        return []
    settings, first = run.config.get("endpoint") or {}, next(iter(counts.values()))
    header, whole = list(HEADER), total(list(counts.values()))
    rows = [row(name, each) for name, each in counts.items()]
    rows += [row("all", whole)] if len(rows) > 1 else []
    if not any(settings.get(field) for field in ("prices", "input_price", "output_price")):
        header, rows = header[:-1], [cells[:-1] for cells in rows]
    sentences = [f"The model {first['model']} at {' and '.join(first['urls'])} judged."]
    if first["prices_date"]:
        sentences.append(f"The prices are those of {first['prices_date']}.")
    if budget := settings.get("budget"):
        sentences.append(f"This run spent {amount(whole['money'])}. The budget of all runs that share the stored answers is "
                         f"{amount(budget)}.")
    caption = "Requests and tokens over all starts of the run, and the failures of single requests by kind"
    return [ReportSection("requests", "Requests to the server", " ".join(sentences), tables=(Table(caption, header, rows),),
                    nav="Requests", order=LAST)]
