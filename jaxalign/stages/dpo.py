"""dpo: trains the policy directly on labelled pairs, or by KTO on single judged answers, without a preference model.

Reads its starting weights (policy and reference) and the pairs or answers of compare or of the data files. Writes checkpoints,
params, metrics, the reference's log-probabilities and a summary.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jaxalign import streams
from jaxalign.config import Config, DPOConfig
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.records import Comparison, Judgement
from jaxalign.registry.objectives import objectives_of
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import held_out_once, labelled_split, pair_loader, print_report
from jaxalign.stages.shared.training import policy_inputs, read_part
from jaxalign.stages.shared.windows import Windows, WindowUse
from jaxalign.steps.checkpoint import save_params
from jaxalign.tracking.accuracy import unlearnt
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.answers import (
    AnswerPairBuilder,
    EncodedAnswers,
    accuracy,
    encode_judged,
    encode_pair,
    judged_arrays,
    pair_arrays,
    separation,
)
from jaxalign.trainers.direct import DPO

KTO_BALANCE = (1.0, 1.5)
"""The range that the KTO paper recommends for desirable_weight * good answers / (undesirable_weight * bad answers)."""
BALANCE_SLACK = 2.0
"""A ratio outside that range by more than this factor causes a warning."""


@STAGES.declare(
    "dpo", makes_policy=True, trains=True, learns_from=("comparisons", "judgements"), windows=True,
    batches=(Batch("dpo.batch"),),
    programs="jaxalign.planner.stage_programs:dpo",
    report="jaxalign.tracking.report.training:direct", preview="jaxalign.stages.shared.preview:dpo_rows",
)
class DPOStage(BuiltinStage):
    name = "dpo"
    config_fields = (
        *reads.MODEL_FIELDS, "data", "world", "preference.max_length", "dpo", "feedback.undecided", "feedback.undecided_weight",
    )

    def inputs(self, config: Config) -> tuple[str, ...]:
        labels = () if sources.is_judged(config) else sources.made_in(config, "compare")
        return (*reads.policy_stages(config, self.name), *labels)

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.dpo
        tokenizer, judged = run_models.load_tokenizer(context), sources.is_judged(config)
        train = _train_in_windows if sources.in_windows(config, "compare") else _train_in_memory
        trainer, summary, extra = train(context, tokenizer, judged)
        save_params(context.directory / "params", trainer.params)
        metrics = read_metrics(context.directory / "metrics.jsonl")
        summary |= {"loss_first": metrics[0]["loss"], "loss_last": metrics[-1]["loss"]}
        measure = separation if judged else accuracy
        summary["held_out"] = measure(section, trainer.inputs.model, trainer.weights, trainer.held_out)
        _warn(context.title, summary | extra)
        write_json(context.directory / "summary.json", summary | extra)


def _warn(title: str, summary: Mapping[str, Any]) -> None:
    """Warns if the held-out accuracy does not reliably exceed chance."""
    if failure := unlearnt(summary):
        print(f"[{title}] warning: {failure}", flush=True)


Trained = tuple[DPO, dict[str, Any], dict[str, Any]]
"""The trainer after training, and the parts of the summary about training and about the data."""


def _trainer(context: StageContext, tokenizer: Tokenizer) -> DPO:
    model = run_models.make_model(context.config, tokenizer.vocab_size)
    return DPO.from_inputs(policy_inputs(context, model, shared=True), context.config.dpo)


def _train_in_memory(context: StageContext, tokenizer: Tokenizer, judged: bool) -> Trained:
    """Trains on rows that are all in memory."""
    config, section = context.config, context.config.dpo
    if judged:
        rows, held_out_rows, report = sources.source_rows(context, tokenizer, "judgements")
    else:
        rows, held_out_rows, report = labelled_split(context, tokenizer, section)
        held_out_rows = held_out_once(context, held_out_rows)
    extra = print_report(context.title, report)
    extra |= {"balance": balance(section, [row.desirable for row in rows], context.title)} if judged else {}
    make = judged_arrays if judged else pair_arrays
    train = make(tokenizer, rows, config.data.style, section, _learns_from_single(section))
    held_out = make(tokenizer, held_out_rows, config.data.style, section)
    per_row = len(train.label) // len(rows)
    loader = pair_loader(context, rows, section.batch, streams.LOADERS["dpo"], per_row)
    trainer = _trainer(context, tokenizer)
    for _ in trainer.fit_arrays(train, loader, held_out):
        pass
    steps = section.steps or loader.steps(section.epochs)
    extra |= read_part(len(train.label), section.batch, steps)
    return trainer, {"steps": steps, "train_rows": len(train.label), "cut": train.cut}, extra


def _train_in_windows(context: StageContext, tokenizer: Tokenizer, judged: bool) -> Trained:
    """Trains on rows of the data files in windows."""
    config, section = context.config, context.config.dpo
    kind, encode_row, make, unit = "comparisons", encode_pair, pair_arrays, "pairs"
    if judged:
        kind, encode_row, make, unit = "judgements", encode_judged, judged_arrays, "answers"

    def encode(row: Comparison | Judgement) -> EncodedAnswers:
        return encode_row(tokenizer, row, config.data.style)

    builder = AnswerPairBuilder(section.max_length, _learns_from_single(section))
    windows = Windows(context, tokenizer, WindowUse(kind, encode, builder, unit, "dpo.max_length"))
    with contextlib.closing(windows.rows):
        labels = windows.rows.first().arrays.label
        extra = {"balance": balance(section, (labels > 0.5).tolist(), context.title)} if judged else {}
        held_out = make(tokenizer, windows.held_out, config.data.style, section)
        steps, trainer = windows.steps(section, section.batch), _trainer(context, tokenizer)
        for _ in trainer.fit_windows(windows.rows, steps, held_out):
            pass
    extra |= windows.finish()
    return trainer, {"steps": steps, "train_rows": windows.report.answers, "cut": windows.report.cut_rows}, extra


def _learns_from_single(section: DPOConfig) -> bool:
    return not objectives_of(section.objective)[0].pairs


def balance(section: DPOConfig, desirable: Sequence[bool], title: str) -> dict[str, float | int | None]:
    """The numbers of good and bad training answers and their weighted ratio.

    Warns if the ratio is far from the range that the KTO paper (arXiv 2402.01306) recommends.

    desirable: whether each answer is good. title: the stage and its round, for the warning.
    """
    good = sum(desirable)
    bad = len(desirable) - good
    weighted = section.desirable_weight * good, section.undesirable_weight * bad
    ratio = weighted[0] / weighted[1] if weighted[1] else None
    low, high = KTO_BALANCE
    if not ratio or not low / BALANCE_SLACK <= ratio <= high * BALANCE_SLACK:
        shown = "infinite" if ratio is None else f"{ratio:.3g}"
        advice = "give answers of both kinds, and weights above 0"
        if ratio:
            wanted = (low + high) / 2 * section.undesirable_weight * bad / good
            advice = f"set config.dpo.desirable_weight to {wanted:.3g}"
        logging.getLogger("jaxalign").warning(
            f"{title}: the weighted ratio of {good} good answers (weight {section.desirable_weight:g}) to {bad} bad ones "
            f"(weight {section.undesirable_weight:g}) is {shown}; the KTO paper recommends {low:g} to {high:g}: {advice}"
        )
    return {"desirable": good, "undesirable": bad, "ratio": ratio}
