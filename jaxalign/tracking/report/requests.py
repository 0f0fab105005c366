"""The section on the requests to the server of `config.endpoint`."""

from __future__ import annotations

from jaxalign.tracking.report.blocks import LAST, ReportSection, Table
from jaxalign.tracking.requests import FIELD, HEADER, amount, row, total
from jaxalign.tracking.workdir import RunFiles


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
