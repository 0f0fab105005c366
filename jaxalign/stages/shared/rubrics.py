"""Rates by rubrics: a judge rates the answers of stage evaluate, and phrases of refusals are counted apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign.algorithms.statistics import mcnemar, paired_difference
from jaxalign.feedback.judge import Draw, RatingRequest
from jaxalign.feedback.rubrics import Rubric, has_refusal_phrase, load_rubrics, rubrics_for
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.stages.shared import engines, judges
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.shards import Shards, queues, row_prompt
from jaxalign.tracking.progress import Progress
from jaxalign.trainers.evaluation import rate

FOLDER = "ratings"
"""The folder of the ratings in that of the stage."""
ALL = "all"
"""The kind of prompts under which the refusal phrases of all answers are counted."""

Rated = Mapping[str, Any]
"""A row of the ratings; see `docs/data_formats.md`."""


def rate_answers(
    context: StageContext, model: Model, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """Rates answers by `config.evaluate.rubrics` with the judge of the stage, in shards that a resumed stage keeps.

    Args:
      context: of stage evaluate.
      model: the architecture of the run's models.
      rows: the rows of the stage, one for each answer.
      kinds: the kind of each prompt by its id (`feedback.rubrics.kinds_of`).

    Returns:
      A row for each answer: "model", "prompt_id", "kind", "ratings" {rubric: rating or None}, "problems" {rubric: problem},
      "reasoning" {rubric: text} if the judge reasons, and "refusal_phrase".
    """
    section, directory = context.config.evaluate, context.directory / FOLDER
    rubrics, batch = load_rubrics(section.rubrics), section.batch
    hosts.once(lambda: directory.mkdir(exist_ok=True))
    shards, planned = Shards(directory), queues(len(rows), batch)
    left = shards.unfinished(planned)
    missing = sum(len(part) for queue in left for part in queue.chunks.values())
    with Progress(context.directory.name, len(rows), len(rows) - missing, unit="rated answer") as progress:
        meter = engines.Meter(engines.timing(context, model), model, progress)
        key = context.key("evaluate", "ratings")
        judge = judges.make_judge(context, "evaluate", model, batch, meter) if left else None
        for number, part in ((number, part) for queue in left for number, part in queue.chunks.items()):
            asked = [(i, k) for i in part for k in range(len(rubrics))
                     if rubrics[k] in rubrics_for(kinds[rows[i]["prompt_id"]], rubrics)]
            prompts = {i: row_prompt(rows[i]) for i in part}
            requests = [RatingRequest(prompts[i].messages, rows[i]["response"], rubrics[k].principle) for i, k in asked]
            with meter.phase("ratings"), judge.loaded() as loaded:
                results = loaded.rate(requests, Draw(key, [i * len(rubrics) + k for i, k in asked]))
            by_answer: dict[int, dict[str, Any]] = {i: {} for i in part}
            for (i, k), result in zip(asked, results, strict=True):
                by_answer[i][rubrics[k].name] = result
            shards.write(number, [_row(rows[i], kinds[rows[i]["prompt_id"]], by_answer[i]) for i in part])
            progress.update(len(part))
    return list(shards.read())


def _row(row: Mapping[str, Any], kind: str | None, results: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = {name: result.reasoning for name, result in results.items() if result.reasoning is not None}
    return {
        "model": row["model"], "prompt_id": row["prompt_id"], "kind": kind,
        "ratings": {name: result.rating for name, result in results.items()},
        "problems": {name: result.problem for name, result in results.items() if result.problem},
        **({"reasoning": reasoning} if reasoning else {}),
        "refusal_phrase": has_refusal_phrase(row["response"]),
    }


def summarise_ratings(
    rated: Sequence[Rated], rubrics: Sequence[Rubric], names: Sequence[str], margin: float
) -> dict[str, Any]:
    """The part "rubrics" of the summary of stage evaluate.

    Args:
      rated: the rows of `rate_answers`.
      rubrics: the rubrics.
      names: the models, in training order.
      margin: `config.evaluate.rubric_margin`.

    Returns:
      "rubrics" (their definitions), "kinds" {kind: prompts}, "margin", "rates" {model: {rubric: the result of `rate` over the
      decided answers, with "undecided", and "least" and "most", the rate of all answers if no undecided one counts, or every
      one}}, "by_kind" {kind: the same for the rubrics that rate its prompts}, "refusal_phrases" {model: {kind or "all": the
      result of `rate`}}, and "differences" (`differences`).
    """
    of_models = {name: [row for row in rated if row["model"] == name] for name in names}
    verdicts = {(name, rubric.name): _verdicts(rows, rubric, margin) for name, rows in of_models.items() for rubric in rubrics}
    kinds = dict.fromkeys(row["kind"] for row in rated if row["kind"] is not None)
    return {
        "rubrics": [{"name": rubric.name, "question": rubric.question, "counts": rubric.counts, "cut": rubric.cut,
                     "kinds": list(rubric.kinds)} for rubric in rubrics],
        "kinds": {kind: sum(row["kind"] == kind for row in of_models[names[0]]) for kind in kinds},
        "margin": margin,
        "rates": {name: {rubric.name: _rate(verdicts[name, rubric.name]) for rubric in rubrics} for name in names},
        "by_kind": {kind: {name: _rates_of_kind(rows, kind, rubrics, margin) for name, rows in of_models.items()}
                    for kind in kinds},
        "refusal_phrases": {
            name: {kind or ALL: rate([row["refusal_phrase"] for row in rows if kind is None or row["kind"] == kind])
                   for kind in (None, *kinds)} for name, rows in of_models.items()},
        "differences": [difference for rubric in rubrics for difference in differences(verdicts, rubric.name, names)],
    }


def _verdicts(rows: Sequence[Rated], rubric: Rubric, margin: float) -> dict[str, bool | None]:
    """Whether each rated answer of one model counts, by prompt; None if it is undecided."""
    return {row["prompt_id"]: rubric.classify(row["ratings"][rubric.name], margin)
            for row in rows if rubric.name in row["ratings"]}


def _rates_of_kind(rows: Sequence[Rated], kind: str, rubrics: Sequence[Rubric], margin: float) -> dict[str, Any]:
    """The rate of one model by each rubric that rates the prompts of a kind, over these prompts."""
    own = [row for row in rows if row["kind"] == kind]
    return {rubric.name: _rate(_verdicts(own, rubric, margin)) for rubric in rubrics_for(kind, rubrics)}


def _rate(verdicts: Mapping[str, bool | None]) -> dict[str, Any]:
    decided = [verdict for verdict in verdicts.values() if verdict is not None]
    undecided, count, total = len(verdicts) - len(decided), sum(decided), len(verdicts)
    least, most = (count / total, (count + undecided) / total) if total else (0.0, 1.0)
    return rate(decided) | {"undecided": undecided, "least": least, "most": most}


def differences(
    verdicts: Mapping[tuple[str, str], Mapping[str, bool | None]], rubric: str, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The differences between successive models, and between the first and the last one, over the same prompts.

    Args:
      verdicts: for each (model, rubric), whether the answer to each prompt counts; None if it is undecided.
      rubric: the name of the rubric.
      names: the models, in training order.

    Returns:
      For each two models that have answers: "rubric", "model", "against" (the earlier one), "pairs" (prompts to which both
      answers are decided), "gained" and "lost" (those at which only the later, or only the earlier answer counts),
      "difference" (of the two rates), "low" and "high" (the bounds of its 95% interval) and "p" (`mcnemar`).
    """
    compared = list(itertools.pairwise(names)) + ([(names[0], names[-1])] if len(names) > 2 else [])
    out = []
    for earlier, later in compared:
        first, second = verdicts[earlier, rubric], verdicts[later, rubric]
        both = [(first[i], second[i]) for i in first if first[i] is not None and second.get(i) is not None]
        gained, lost = both.count((False, True)), both.count((True, False))
        if both:
            low, high = paired_difference(gained, lost, len(both))
            out.append({"rubric": rubric, "model": later, "against": earlier, "pairs": len(both), "gained": gained,
                        "lost": lost, "difference": (gained - lost) / len(both), "low": low, "high": high,
                        "p": mcnemar(gained, lost)})
    return out
