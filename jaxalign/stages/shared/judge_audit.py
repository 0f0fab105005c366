"""Asks the judge of a stage about gold pairs, for `jaxalign.judge_audit`. No stage needs to have run, except one whose model
judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.config.finished import tokenizer_path
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.errors import UserError
from jaxalign.feedback.audit import FIRST, SECOND, TIE, Audit, Trial, make_audit
from jaxalign.feedback.constitution import load_constitution
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.decisions import fixed
from jaxalign.feedback.judge import ComparisonRequest, Draw, Verdict
from jaxalign.feedback.jury import Jury
from jaxalign.records import Comparison, Principle
from jaxalign.registry.judges import judge_field, judge_name, stage_judge
from jaxalign.stages.shared import judges, reads, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import DONE, read_manifest
from jaxalign.tracking.judge_audit import BUILT_IN
from jaxalign.tracking.progress import Progress

_NAME = "judge_audit"


class _Question(NamedTuple):
    """A gold pair under one principle. pair: its index. number: the row of the judge's randomness. shown: the answers in the
    first order. gold: the correct outcome in this order."""

    pair: int
    number: int
    comparison: Comparison
    principle: Principle
    shown: tuple[str, str]
    gold: str

    def request(self, order: int) -> ComparisonRequest:
        """The request in the first order (0), or with the answers swapped (1)."""
        first, second = self.shown if order == 0 else self.shown[::-1]
        return ComparisonRequest(self.comparison.prompt.messages, first, second, self.principle)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A judge whose verdicts are known."""

    verdicts: Sequence[Verdict]

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> Sequence[Verdict]:
        return self.verdicts


def audit_judge(context: StageContext, limit: int = 0, pairs: Sequence[Comparison] | None = None) -> dict[str, Any]:
    """Audits the judge of a stage, and each member of a jury.

    Args:
      context: of the stage (`context.directory.name`), "compare" or "evaluate".
      limit: the number of pairs to read from each file; 0 reads all.
      pairs: some of the built-in gold pairs; None for those of `gold_pairs`.

    Returns:
      The content of judge_audit.json (docs/data_formats.md).

    Raises:
      UserError: the judge cannot be asked, a stage whose model judges has not finished, or a file has no pairs.
    """
    config, stage = context.config, context.directory.name
    judges.feedback_files(config, stage)  # Checks the judge and its templates, as the run does before its first stage.
    _check_finished(context, stage)
    if pairs is None:
        pairs, files = gold_pairs(config, limit)
    else:
        files = [{"path": BUILT_IN, "rows": len(pairs), "pairs": len(pairs)}]
    questions = _questions(config, pairs)
    name, members = judge_name(config, stage), []
    if name == "model":
        for folder in config.judge.path:  # Each member is asked as the only judge.
            settings = dataclasses.replace(config, judge=dataclasses.replace(config.judge, path=(folder,)))
            members.append(dataclasses.replace(context, config=settings))
    asked = [_ask(member, stage, questions) for member in members or [context]]
    audits = [_measure(config, questions, verdicts) for verdicts in asked]
    jury = len(members) > 1
    if jury:
        draw = Draw(jax.random.key(0), [question.number for question in questions])  # Recorded verdicts do not depend on it.
        of_jury = [
            Jury(tuple(_Recorded(verdicts[order]) for verdicts in asked)).compare([q.request(order) for q in questions], draw)
            for order in range(2)
        ]
        audits.insert(0, _measure(config, questions, of_jury))
    named = list(config.judge.path) if name == "model" else [name]
    results = [{"judge": judge, "audit": audit.to_dict()}
               for judge, audit in zip(["jury"] * jury + named, audits, strict=True)]
    return {
        "stage": stage, "constitution": config.feedback.constitution, "seed": config.seed,
        "undecided_margin": fixed(config.feedback).margin, "files": files,
        **results[0], **({"members": results[1:]} if jury else {}),
    }


def gold_pairs(config: Config, limit: int = 0) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """The gold pairs of `config.judge.audit`, or those in the package, with the chosen answer first; and for each file its
    path and the numbers of its rows and usable pairs."""
    if not config.judge.audit:
        with resources.as_file(resources.files("jaxalign.feedback") / "gold_pairs" / "default.jsonl") as path:
            pairs, report = read_preferences(path, limit=limit, gold=True)
        return pairs, [{"path": BUILT_IN, "rows": report.rows, "pairs": report.pairs}]
    pairs, files = [], []
    for path in config.judge.audit:
        file_pairs, report = read_preferences(path, max_bad_share=config.data.max_bad_share, limit=limit, gold=True)
        print("\n".join(f"[{_NAME}] {sentence}" for sentence in report.sentences()), flush=True)
        pairs += file_pairs
        files.append({"path": path, "rows": report.rows, "pairs": report.pairs})
    return pairs, files


def _check_finished(context: StageContext, stage: str) -> None:
    """Raises UserError if a stage whose model judges has not finished."""
    config = context.config
    if not stage_judge(config, stage).runs_base:
        return
    for needed in dict.fromkeys((*reads.base_stages(config), *judges.judge_stages(config, stage))):
        manifest = read_manifest(context.input_directory(needed))
        if manifest is None or manifest.status != DONE:
            raise UserError(f"config.{judge_field(config, stage)} is {judge_name(config, stage)!r}, and stage {needed}, whose "
                            f"model judges, has not finished in {context.workdir}; run it first, or choose another judge")


def _questions(config: Config, pairs: Sequence[Comparison]) -> list[_Question]:
    """The questions about each pair: under its own principle if the constitution has it, else under principles drawn for its
    row."""
    constitution = load_constitution(config.feedback.constitution)
    count, seed = config.feedback.principles_per_comparison, config.seed
    by_name = {principle.name: principle for principle in constitution}
    drawn = draw_principles(constitution, range(len(pairs)), count, seed, streams.PRINCIPLES["audit"])
    questions = []
    for row, (pair, others) in enumerate(zip(pairs, drawn, strict=True)):
        own = [by_name[name] for name in pair.principles if name in by_name]
        chosen_first = bool(np.random.default_rng([seed, streams.AUDIT_ORDER, row]).integers(2))
        shown = (pair.response_a, pair.response_b) if chosen_first else (pair.response_b, pair.response_a)
        gold = TIE if not pair.decided else FIRST if chosen_first else SECOND
        questions += [_Question(row, row * count + k, pair, rule, shown, gold) for k, rule in enumerate(own or others)]
    return questions


def _ask(context: StageContext, stage: str, questions: Sequence[_Question]) -> list[list[Verdict]]:
    """The verdicts of the judge on all questions, in the first order and with the answers swapped."""
    config, verdicts = context.config, ([], [])
    model, chunk = None, config.compare.batch
    if tokenizer_path(config, context.workdir).exists():  # Another judge needs no base model.
        model = run_models.make_model(config, run_models.load_tokenizer(context).vocab_size)
    judge, key = judges.make_judge(context, stage, model, chunk), context.key(_NAME, streams.SAMPLES)
    with judge.loaded() as loaded, Progress(_NAME, len(questions), unit="pair") as progress:
        for start in range(0, len(questions), chunk):
            part = questions[start : start + chunk]
            for order in range(2):
                draw = Draw(jax.random.fold_in(key, order), [question.number for question in part])
                verdicts[order].extend(loaded.compare([question.request(order) for question in part], draw))
            progress.update(len(part))
    return list(verdicts)


def _measure(config: Config, questions: Sequence[_Question], verdicts: Sequence[Sequence[Verdict]]) -> Audit:
    """The audit of the verdicts on both orders of each question."""
    trials = [
        Trial(question.pair, question.gold, tuple(map(len, question.shown)), question.principle.name,
              question.comparison.prompt.columns.get("kind"), both)
        for question, both in zip(questions, zip(*verdicts, strict=True), strict=True)
    ]
    return make_audit(trials, fixed(config.feedback).margin, config.seed)
