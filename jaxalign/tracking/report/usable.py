"""The rows that the stages made, those that can be used, and the reasons for the difference, in sentences."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from jaxalign.data.sources.reports import JudgementReport, PreferenceReport, PromptReport
from jaxalign.reasons import (
    advice,
    audit_warnings,
    few_usable,
    label_warnings,
    pairs_sentence,
    self_agreement_sentence,
    usable_sentence,
)
from jaxalign.tracking.formatting import capitalized
from jaxalign.tracking.workdir import RunFiles

_REPORTS = {
    "prompts": (PromptReport, "prompts kept"),
    "pairs": (PreferenceReport, "pairs kept"),
    "desirable": (JudgementReport, "good answers kept"),
}
"""By a field that only one kind of report on a file has: the report, and the meaning of the field."""


def row_sentences(run: RunFiles) -> list[str]:
    """Counts the rows of files, the answers and revisions, the labelled pairs, and the rows that training used."""
    sentences = list(_file_sentences(run))
    revised, trained, compared = _revised(run), run.stage("sft").summary, run.stage("compare").summary
    if revised:
        sentences.append(usable_sentence("answers and revisions", revised["total"], revised["usable"],
                                         revised.get("reasons") or {}, revised.get("kept")) + ".")
    if answers := trained.get("answers"):
        cut = ""
        if trained.get("cut"):
            cut = f"; {trained['cut']:,} of them, with their prompts, were cut to sft.row_length tokens"
        held_out = f" and {revised['usable'] - answers:,} were held out to measure the loss" if revised else ""
        sentences.append(f"Fine-tuning used {answers:,} answers{cut}{held_out}.")
    if compared.get("pairs"):
        sentences.append(pairs_sentence(compared) + ".")
        if "margin" in compared["calibration"]:
            sentences.append(capitalized(self_agreement_sentence(compared)) + ".")
    return sentences


def warnings(run: RunFiles) -> list[str]:
    """Sentences that start with "Warning", if few rows can be used or the judge's verdicts say little."""
    problems, revised = [], _revised(run)
    limits = run.config.get("sft") or {}
    if revised and "min_rows" in limits and "min_share" in limits:
        sentence = few_usable(types.SimpleNamespace(**limits), revised["total"], revised["usable"])
        problems.append(sentence and f"{sentence}: {advice(revised.get('reasons') or {})}")
    later = [(f"in round {number}, ", stages["compare"]) for number, stages in run.later.items() if "compare" in stages]
    for place, stage in [("", run.stage("compare")), *later]:
        if stage.summary.get("pairs"):
            problems += [place + sentence for sentence in label_warnings(stage.summary)]
    if run.audit:
        problems += audit_warnings(run.audit["audit"])
    return [f"Warning: {sentence}." for sentence in problems if sentence]


def _revised(run: RunFiles) -> Mapping[str, Any]:
    """The report on the rows of stage revise that sft uses: of sft if it ran, else of revise; empty if there is none."""
    for content in (run.stage("sft").summary.get("data"), run.stage("revise").summary.get("usable")):
        if content and "usable" in content:
            return content
    return {}


def _file_sentences(run: RunFiles) -> Iterator[str]:
    """What was read from each file, once."""
    shown = set()
    for stage in run.planned:
        data = run.stage(stage).summary.get("data") or {}
        for content in data.get("files", [data] if "path" in data else []):
            field = next((field for field in _REPORTS if field in content), None)
            if field is None or content["path"] in shown:
                continue
            shown.add(content["path"])
            report, kept = _REPORTS[field]
            reasons = [f"{len(content[name])} {meaning.replace('; ', ', ')}" for name, meaning in report.reasons.items()
                       if content.get(name)]
            listed = f" ({'; '.join(reasons)})" if reasons else ""
            yield f"{content['path']}: {content['rows']:,} rows, {content[field]:,} {kept}{listed}."
