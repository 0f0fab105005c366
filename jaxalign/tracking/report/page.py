"""Renders a run as one HTML file that needs nothing beside it: styles and plots are inside, nothing is loaded.

Every text of the run, model output above all, is escaped, and the page's content policy forbids scripts and loads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2

from jaxalign.storage import write_atomically
from jaxalign.tracking.formatting import short_percent
from jaxalign.tracking.measures import model_phrase, model_title
from jaxalign.tracking.report import examples as pick
from jaxalign.tracking.report import prose, sections, training_sections
from jaxalign.tracking.workdir import RunFiles, read_run

# What HTML forbids, or a terminal would obey; shown as the replacement character.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_REVISED, _LABELLED, _MISTAKES = 4, 3, 6


def render_report(workdir: str | Path, examples: int | None = None) -> Path:
    """Writes `workdir`/report.html from what is in the work directory, in one atomic replacement.

    Stages may be missing or unfinished: their sections say so. Nothing but report.html is written.

    Args:
        workdir: a run's work directory, laid out as `docs/data_formats.md` says.
        examples: prompts shown with every model's answer, spread evenly over the kinds of prompts (rounded up);
            None takes the config's `evaluate.examples`, or 12 without one.

    Returns:
        The path of the report.

    Raises:
        UserError: the directory is missing or holds nothing to report, or a file in it is damaged.
    """
    run = read_run(workdir)
    if examples is None:
        configured = (run.config.get("evaluate") or {}).get("examples")
        examples = 12 if configured is None else configured
    page = _environment().get_template("report.html.j2").render(_context(run, examples))
    path = run.path / "report.html"
    write_atomically(path, _CONTROL.sub("\ufffd", page))
    return path


def _context(run: RunFiles, shown: int) -> dict[str, Any]:
    return {
        "name": run.path.resolve().name,
        "seed": run.config.get("seed", run.evaluation.get("seed")),
        "stages": [(name, run.stage(name).status or "not run") for name in run.planned if name != "report"],
        "lead": prose.lead(run),
        "headlines": prose.headlines(run),
        "span": [model_phrase(model, run.planned) for model in (run.models[:1] + run.models[-1:])],
        "behaviour": sections.behaviour(run),
        "wins": sections.win_rates(run),
        "answers": _answers(run, shown),
        "revisions": _revisions(run),
        "labels": sections.labels(run),
        "labelled": pick.labelled_pairs(run.rows("compare"), _LABELLED),
        "numbers": [sections.preference(run), *sections.distilled(run), *training_sections.direct(run),
                    training_sections.reinforcement(run), training_sections.losses(run), training_sections.costs(run)],
        "config": list(_config_lines(run.config)),
    }


def _answers(run: RunFiles, shown: int) -> dict[str, Any]:
    rows = list(run.rows("evaluate"))
    models = list(run.models or dict.fromkeys(row["model"] for row in rows))
    kinds = dict.fromkeys(row.get("kind") for row in rows)
    each = math.ceil(shown / max(len(kinds), 1))
    groups = pick.answered_prompts(rows, models, each)
    return {
        "missing": "" if rows else run.absence("evaluate", "answers side by side"),
        "models": [model_title(model, run.planned) for model in models],
        "groups": [(pick.kind_title(kind), prompts) for kind, prompts in groups.items()],
        "chosen": f"The first {each} prompts" + (" of each kind" if len(kinds) > 1 else ""),
        "mistakes": pick.mistakes(rows, models[-1], _MISTAKES) if models else [],
        "judged": any(row.get("gold") for row in rows),
        "verified": any("correct" in (row.get("gold") or {}) for row in rows),
    }


def _revisions(run: RunFiles) -> dict[str, Any]:
    rows = list(run.rows("revise"))
    return {
        "missing": "" if rows else run.absence("revise", "critiques and revisions"),
        "prompts": pick.revised_prompts(rows, _REVISED),
        "rounds": [f"Round {number} changed {changed:,} of {total:,} answers ({short_percent(changed / total)})."
                   for number, changed, total in pick.rewritten_by_round(rows)],
    }


def _config_lines(config: Mapping[str, Any], prefix: str = "config.") -> Iterator[str]:
    """The config as the flags that would set it, one a line."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_lines(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value, ensure_ascii=False)}"


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("jaxalign.tracking.report", "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined)
