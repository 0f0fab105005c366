"""Renders a run as a single HTML file with embedded styles and plots, without scripts or external resources.

The records of the run's stages define the sections (`jaxalign.registry.stages.StageRecord.report`). A content security policy
in the page forbids scripts and loading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import time
from pathlib import Path

from jaxalign.config.root import unread_fields
from jaxalign.config.schema import leaves
from jaxalign.errors import UserError
from jaxalign.registry.stages import StageRecord
from jaxalign.storage import write_atomically
from jaxalign.tracking.measures import model_phrase
from jaxalign.tracking.report import prose
from jaxalign.tracking.report.alarms import rl_samples
from jaxalign.tracking.report.blocks import ReportSection
from jaxalign.tracking.report.changes import changes, live_sentences
from jaxalign.tracking.report.costs import costs, requests
from jaxalign.tracking.report.device_times import device_times
from jaxalign.tracking.report.feedback import audit
from jaxalign.tracking.report.headlines import headlines, model_table
from jaxalign.tracking.report.ratings import human_ratings
from jaxalign.tracking.report.roles import judging_stages
from jaxalign.tracking.report.rounds import across_rounds
from jaxalign.tracking.report.templating import render
from jaxalign.tracking.watching.run import RunView
from jaxalign.tracking.workdir import RunFiles, read_run

# Characters that HTML forbids or a terminal would interpret; each becomes the replacement character.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def render_report(workdir: str | Path, examples: int | None = None, refresh: float | None = None) -> Path:
    """Writes `workdir`/report.html from the files in the work directory, replacing it atomically.

    Sections of unfinished stages state that. No other file is written.

    Args:
      workdir: a run's work directory, in the layout of `docs/data_formats.md`.
      examples: the number of prompts shown with every model's answer, spread evenly over the kinds of prompts and rounded up;
        None: `evaluate.examples` of the run's config, or 12 without a config.
      refresh: the seconds after which a browser loads the page again, for a run that goes on; None for one that does not.

    Returns:
      The path of the report.

    Raises:
      UserError: the directory is missing or has nothing to report, or a file in it is damaged.
    """
    run = read_run(workdir)
    if examples is not None:
        evaluate = {**(run.config.get("evaluate") or {}), "examples": examples}
        run = dataclasses.replace(run, config={**run.config, "evaluate": evaluate})
    path = run.path / "report.html"
    try:
        page = _page(run, refresh)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path} cannot be written, because a file of a stage has another form than expected "
                        f"({type(error).__name__}: {error}); restore the file, or move the folder of its stage aside to run "
                        "the stage again") from error
    write_atomically(path, CONTROL.sub("\ufffd", page))
    return path


def _page(run: RunFiles, refresh: float | None) -> str:
    """The report's HTML. That of a run that goes on begins with its progress, and omits the sections that have only reasons
    why they are empty."""
    status = None if refresh is None else RunView(run.path).status()
    shown = sections(run, status.stage if status else "")
    return render(
        "report.html.j2",
        refresh=None if refresh is None else max(1, round(refresh)),
        written="" if refresh is None else time.strftime("%H:%M:%S"),
        name=run.path.resolve().name,
        seed=run.config.get("seed", run.evaluation.get("seed")),
        stages=[(name, _state(run, name)) for name in run.runs if name != "report"],
        end=prose.end_sentence(run),
        lead=prose.lead(run),
        live=live_sentences(run, status) if status else (),
        headlines=headlines(run),
        models=model_table(run),
        terms=prose.terms(run),
        span=[model_phrase(model, run.used) for model in (run.models[:1] + run.models[-1:])],
        sections=shown if refresh is None else [section for section in shown if section.filled],
        config=_config_lines(run),
    )


def _state(run: RunFiles, label: str) -> str:
    """The state of a stage in words, by its label in `RunFiles.runs`."""
    status = run.runs[label].status
    if run.end is not None and run.end.stage == label and (run.failure is not None or status != "done"):
        return run.end.event
    return status or "not run"


def sections(run: RunFiles, running: str = "") -> list[ReportSection]:
    """The sections of the changes, the rounds, the stages, people's ratings, the audit, the requests to a server and the
    costs, sorted by `ReportSection.order`, then by the order of stages.

    running: the label of the stage that the opening describes.
    """
    of_stages, functions = [], []
    for record in run.records:
        if record.report is None or record.report in functions:  # Stages that share a function share its sections.
            continue
        functions.append(record.report)
        of_stages += _sections_of(record, run)
    shown = [*changes(run, running), *across_rounds(run), *of_stages, *human_ratings(run), *rl_samples(run), *audit(run),
             *requests(run), *device_times(run), costs(run)]
    return sorted((section for section in shown if section.filled or section.missing), key=lambda section: section.order)


def _sections_of(record: StageRecord, run: RunFiles) -> list[ReportSection]:
    """A stage's sections. If a custom report function fails, a single section reports the failure."""
    function = record.load("report")
    try:
        result = function(run)
        parts = [result] if isinstance(result, ReportSection) else list(result)
        wrong = next((part for part in parts if not isinstance(part, ReportSection)), None)
        if wrong is not None:
            raise TypeError(f"an object of type {type(wrong).__name__} was returned; a ReportSection or a list of them is "
                            "expected")
        return parts
    except UserError:
        raise
    except Exception as error:  # The user's function may raise anything.
        if function.__module__.startswith("jaxalign."):
            raise
        sentence = f"The report function of stage {record.name} failed ({type(error).__name__}: {error})."
        logging.getLogger("jaxalign").warning(sentence)
        return [ReportSection(record.name, record.name, sentence)]


def _config_lines(run: RunFiles) -> tuple[list[str], list[str]]:
    """(the settings that the run read, the others), as "config.FIELD = VALUE" lines.

    A setting is read if a stage depends on it by its manifest, or if it belongs to a planned stage, to a judge that was asked
    or to no stage's results; the values of other settings must not make it ineffective. Before all planned stages have started,
    only the last condition applies.
    """
    stages = [run.stage(name) for name in run.planned]
    recorded = {name for stage in run.stages.values() for name in stage.config}
    waiting = not recorded or any(stage.status is None for stage in stages if stage.name != "report")
    ineffective = set()
    with contextlib.suppress(UserError):  # The config names a custom part that cannot be loaded any more.
        ineffective = unread_fields(run.config)
    asked = any(judging_stages(run))
    judges = ((run.config.get("feedback") or {}).get("judge"), *(run.config.get("judge") or {}).values())
    # Manifests lack the settings of speed and failures of these sections.
    judged = {"feedback": asked, "judge": asked, "endpoint": asked and "endpoint" in judges}
    read, others = [], []
    for name, value in leaves(run.config):
        section = name.partition(".")[0]
        parents = {name[:end] for end in (*(i for i, char in enumerate(name) if char == "."), len(name))}
        used = section in _NO_RESULTS or section in run.planned or not parents.isdisjoint(recorded)
        used = waiting or judged.get(section, used)
        (read if used and parents.isdisjoint(ineffective) else others).append(
            f"config.{name} = {json.dumps(value, ensure_ascii=False)}")
    return read, others


_NO_RESULTS = ("mesh", "placement", "tracking", "stages", "rounds", "compile_cache", "profile", "seed")
"""Settings that stages read although the results of single stages do not depend on them."""
