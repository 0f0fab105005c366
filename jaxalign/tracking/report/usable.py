"""The rows that the stages made, those that can be used, and the reasons for the difference, in sentences."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from jaxalign.data.sources.reports import JudgementReport, PreferenceReport, PromptReport
from jaxalign.reasons import (
    advice,
    audit_warnings,
    few_decided,
    few_usable,
    mostly_chance,
    mostly_outside,
    pairs_sentence,
    self_agreement_sentence,
    usable_sentence,
)
from jaxalign.tracking.formatting import capitalized
from jaxalign.tracking.workdir import RunFiles, StageFiles

_REPORTS = {"prompts": PromptReport, "pairs": PreferenceReport, "desirable": JudgementReport}
"""The reports on the rows of a file by a field that only they have."""


def row_sentences(run: RunFiles) -> list[str]:
    """Counts the rows of files, the answers and revisions, the labelled pairs, and the rows that training used."""
    sentences = list(_file_sentences(run))
    if revised := _revised(run):
        sentences.append(usable_sentence("answers and revisions", revised["total"], revised["usable"],
                                         revised.get("reasons") or {}, revised.get("kept")) + ".")
    sentences += _training_sentence(run, revised)
    if compared := _compared(run.stage("compare")):
        sentences.append(pairs_sentence(compared) + ".")
        if "margin" in compared["calibration"]:
            sentences.append(capitalized(self_agreement_sentence(compared)) + ".")
    return sentences


def _training_sentence(run: RunFiles, revised: Mapping[str, Any]) -> list[str]:
    summary = run.stage("sft").summary
    if not summary.get("answers"):
        return []
    held_out = f" and {revised['usable'] - summary['answers']:,} were held out to measure the loss" if revised else ""
    cut = f"; {summary['cut']:,} of them, with their prompts, were cut to sft.row_length tokens" if summary.get("cut") else ""
    return [f"Fine-tuning used {summary['answers']:,} answers{cut}{held_out}."]


def warnings(run: RunFiles) -> list[str]:
    """Sentences that start with "Warning", if few rows can be used or the judge's verdicts say little."""
    found, revised = [], _revised(run)
    limits = run.config.get("sft") or {}
    if revised and "min_rows" in limits and "min_share" in limits:
        sentence = few_usable(types.SimpleNamespace(**limits), revised["total"], revised["usable"])
        found.append(sentence and f"{sentence}: {advice(revised.get('reasons') or {})}")
    later = [(f"in round {number}, ", stages["compare"]) for number, stages in run.later.items() if "compare" in stages]
    for place, stage in [("", run.stage("compare")), *later]:
        if compared := _compared(stage):
            about = (few_decided(compared), mostly_outside(compared), mostly_chance(compared))
            found += [place + sentence for sentence in about if sentence]
    if run.audit:
        found += audit_warnings(run.audit["audit"])
    return [f"Warning: {sentence}." for sentence in found if sentence]


def _revised(run: RunFiles) -> Mapping[str, Any]:
    """The report on the rows of stage revise that sft uses: of sft if it ran, else of revise; empty if there is none."""
    for content in (run.stage("sft").summary.get("data"), run.stage("revise").summary.get("usable")):
        if content and "usable" in content:
            return content
    return {}


def _compared(stage: StageFiles) -> Mapping[str, Any]:
    """The summary of stage compare in a round; empty if there is none or it has no pairs."""
    return stage.summary if stage.summary.get("pairs") else {}


def _file_sentences(run: RunFiles) -> Iterator[str]:
    """What was read from each file, once."""
    shown = set()
    for stage in run.planned:
        data = run.stage(stage).summary.get("data") or {}
        for content in data.get("files", [data] if "path" in data else []):
            report = next((made for field, made in _REPORTS.items() if field in content), None)
            if report is not None and content["path"] not in shown:
                shown.add(content["path"])
                yield _file_sentence(content, report)


def _file_sentence(content: Mapping[str, Any], report: type) -> str:
    kept = {"prompts": "prompts kept", "pairs": "pairs kept", "desirable": "good answers kept"}
    field = next(name for name, made in _REPORTS.items() if made is report)
    reasons = [f"{len(content[name])} {meaning.replace('; ', ', ')}" for name, meaning in report.reasons.items()
               if content.get(name)]
    listed = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{content['path']}: {content['rows']:,} rows, {content[field]:,} {kept[field]}{listed}."
