"""sft: fine-tunes the base on revisions and helpful samples, or on answers from files: the preferred or the demonstrated ones.

Reads revise, or the files if the run has no revise. Writes checkpoints, params, metrics and a summary.
"""

from __future__ import annotations

import contextlib

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader
from jaxalign.data.packing import pack
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import Document, PackedRowBuilder
from jaxalign.models.model import Model
from jaxalign.records import Comparison, Demonstration
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.breakdown import prompt_shares
from jaxalign.stages.shared.builtin import BuiltinStage
from jaxalign.stages.shared.labelled import (
    RevisionReport,
    answer_kind,
    answer_of,
    answered,
    print_report,
    revision_rows,
    warn_about_few,
)
from jaxalign.stages.shared.shards import Shards
from jaxalign.stages.shared.training import stage_inputs, train_supervised
from jaxalign.stages.shared.windows import Windows, WindowUse
from jaxalign.trainers.inputs import TrainerInputs
from jaxalign.trainers.sft import packed


@STAGES.declare(
    "sft", makes_policy=True, trains=True, learns_from=("revisions", "comparisons", "demonstrations"), windows=True,
    batches=(Batch("sft.batch_rows", ("sft.micro_batches",)),),
    programs="jaxalign.planner.stage_programs:sft",
    report="jaxalign.tracking.report.training:losses", preview="jaxalign.stages.shared.preview:sft_rows",
)
class SftStage(BuiltinStage):
    name = "sft"
    config_fields = (*reads.MODEL_FIELDS, "data", "world", "sft", "preference.max_length")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*reads.base_stages(config), *sources.made_in(config, "revise"))

    def run(self, context: StageContext) -> None:
        config, section = context.config, context.config.sft
        tokenizer = run_models.load_tokenizer(context)
        model = run_models.make_model(config, tokenizer.vocab_size)
        if sources.in_windows(config, "revise"):
            self._run_in_windows(context, tokenizer, model)
            return
        train, held_out, report = answered(context, tokenizer)
        extra = print_report(self.name, report)
        if isinstance(report, RevisionReport):
            revised, _ = revision_rows(config, Shards(context.input_directory("revise")).read())
            extra |= prompt_shares(context, [row["source"] for row in revised], "answers")
        total, usable = (report.total, report.usable) if isinstance(report, RevisionReport) else (len(train), len(train))
        warn_about_few(self.name, section, total, usable)
        rows, cut = packed(tokenizer, train, config.data.style, section.row_length)
        if cut:
            print(f"[{self.name}] warning: {cut:,} of {len(train):,} answered prompts are cut to sft.row_length "
                  f"({section.row_length} tokens); raise it", flush=True)
        held_rows = packed(tokenizer, held_out, config.data.style, section.row_length)[0] if held_out else None
        steps = section.steps or EpochLoader(len(rows.tokens), section.batch_rows, config.seed).steps(section.epochs)
        extra |= {"answers": len(train), "cut": cut}
        train_supervised(context, section, self._inputs(context, model), rows, held_rows, steps, lambda: extra)

    def _run_in_windows(self, context: StageContext, tokenizer: Tokenizer, model: Model) -> None:
        config, section = context.config, context.config.sft

        def encode(row: Comparison | Demonstration) -> Document:
            return styles.encode_completion(tokenizer, *answer_of(row), config.data.style)

        use = WindowUse(answer_kind(config), encode, PackedRowBuilder(section.row_length), "answers", "sft.row_length")
        windows = Windows(context, tokenizer, use)
        with contextlib.closing(windows.rows):
            warn_about_few(self.name, section, windows.usable, windows.usable)
            held_out = list(map(encode, windows.held_out))
            held_rows = pack(held_out, section.row_length)[0] if held_out else None
            steps = windows.steps(section, section.batch_rows)

            def summary() -> dict:
                return windows.finish() | {"answers": windows.report.answers, "cut": windows.report.cut_rows}

            train_supervised(context, section, self._inputs(context, model), windows.rows, held_rows, steps, summary)

    def _inputs(self, context: StageContext, model: Model) -> TrainerInputs:
        return stage_inputs(
            context,
            model,
            weights=lambda: run_models.start_params(context, model),
            trained=lambda weights: run_models.trained_params(context, model, weights, self.name, shared=False),
        )
