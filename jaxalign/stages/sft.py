"""sft: supervised fine-tuning of the base on revisions and helpful samples, or on the chosen human answers.

Reads revise (world) or the preference file. Writes checkpoints, params, metrics and a summary.
"""

from __future__ import annotations

from jaxalign.config import Config
from jaxalign.data.loader import EpochLoader
from jaxalign.data.packing import pack
from jaxalign.data.tokenizer import Tokenizer
from jaxalign.errors import UserError
from jaxalign.stages import common, sources
from jaxalign.stages.base import Stage, StageContext
from jaxalign.stages.lm import train_lm
from jaxalign.stages.shards import Shards, row_prompt


class Sft(Stage):
    name = "sft"
    config_fields = (*common.MODEL_FIELDS, "data", "world", "sft", "preference.max_length")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return (*common.base_stages(config), *(("revise",) if config.data.source == "world" else ()))

    def files(self, config: Config):
        return common.base_files(config) | sources.data_files(config)

    def run(self, context: StageContext) -> None:
        config = context.config
        tokenizer = common.load_tokenizer(context)
        model = common.make_model(config, tokenizer.vocab_size)
        if config.data.source == "world":
            train, held_out, extra = *_revisions(context, tokenizer), {}
        else:
            train, held_out, report = sources.human_comparisons(context, tokenizer)
            answered = lambda pairs: [(c.prompt.messages, c.response_a) for c in pairs]  # noqa: E731
            train, held_out, extra = answered(train), answered(held_out), {"data": report.to_dict()}
            for sentence in report.sentences():
                print(f"[{self.name}] {sentence}", flush=True)
        row_length = config.sft.row_length

        def packed(answered):
            documents = (sources.encode_completion(tokenizer, m, text, config.data.style) for m, text in answered)
            return pack(documents, row_length)

        rows, cut = packed(train)
        steps = EpochLoader(len(rows.tokens), config.sft.batch_rows, config.seed).steps(config.sft.epochs)
        train_lm(
            context, config.sft, model, rows, packed(held_out)[0] if held_out else None, steps,
            lambda: common.trained_params(context, model, common.start_params(context, model), self.name, shared=False),
            extra=extra | {"answers": len(train), "cut": cut},
        )  # fmt: skip


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
