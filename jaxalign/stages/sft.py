"""sft: supervised fine-tuning of the base on revisions and helpful samples, or on the chosen human answers.

Reads revise (world) or the preference file. Writes checkpoints, params, metrics and a summary.
"""

from __future__ import annotations

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader
from jaxalign.data.packing import pack
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import PackedBatch
from jaxalign.stages.shared import common, sources
from jaxalign.stages.shared.base import Stage, StageContext
from jaxalign.stages.shared.lm import train_lm
from jaxalign.stages.shared.shards import Shards, row_prompt


class Sft(Stage):
    name = "sft"
    config_fields = (*common.MODEL_FIELDS, "data", "world", "sft", "preference.max_length")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*common.base_stages(config), *sources.made_in(config, "revise"))

    def files(self, config: Config):
        return common.base_files(config) | sources.data_files(config)

    def run(self, context: StageContext) -> None:
        config = context.config
        tokenizer = common.load_tokenizer(context)
        model = common.make_model(config, tokenizer.vocab_size)
        train, held_out, report = answered(context, tokenizer)
        for sentence in report.sentences() if report else ():
            print(f"[{self.name}] {sentence}", flush=True)
        extra = {"data": report.to_dict()} if report else {}
        rows, cut = packed(config, tokenizer, train)
        steps = EpochLoader(len(rows.tokens), config.sft.batch_rows, config.seed).steps(config.sft.epochs)
        train_lm(
            context, config.sft, model, rows, packed(config, tokenizer, held_out)[0] if held_out else None, steps,
            lambda: common.trained_params(context, model, common.start_params(context, model), self.name, shared=False),
            extra=extra | {"answers": len(train), "cut": cut},
        )  # fmt: skip


def answered(context: StageContext, tokenizer: Tokenizer):
    """(train, held out, report of the file): (messages, answer) pairs to imitate; no report for the world."""
    if sources.made_in(context.config, "revise"):
        return *_revisions(context, tokenizer), None
    train, held_out, report = sources.human_comparisons(context, tokenizer)
    return *([(c.prompt.messages, c.response_a) for c in pairs] for pairs in (train, held_out)), report


def packed(config: Config, tokenizer: Tokenizer, pairs) -> tuple[PackedBatch, int]:
    """Answered prompts as packed rows, and how many were cut at the end of a row; the loss is on the answers."""
    documents = (styles.encode_completion(tokenizer, m, text, config.data.style) for m, text in pairs)
    return pack(documents, config.sft.row_length)


def _revisions(context: StageContext, tokenizer: Tokenizer):
    """(train, held out): (messages, answer) pairs from complete revisions and helpful samples; every 20th is held out."""
    rounds = context.config.revise.rounds
    answered = []
    for row in Shards(context.input_directory("revise")).read():
        used = row["round"] == 0 or context.config.sft.rounds_used == "all" or row["round"] == rounds
        if row["complete"] and used:
            answered.append((row_prompt(row).messages, row["revision"] if row["round"] else row["response"]))
    if len(answered) < 2:
        raise UserError(
            f"{len(answered)} of the answers and revisions of stage revise came to their end, too few to learn from; raise "
            "revise.max_new_tokens, or train the base for longer (pretrain.steps)"
        )
    held_out = answered[::20]
    return [pair for i, pair in enumerate(answered) if i % 20], held_out


STAGE = Sft()
