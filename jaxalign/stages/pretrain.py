"""pretrain: trains the tokenizer and the helpful-only base on the text of the data source.

Writes tokenizer.model, checkpoints, params, metrics and a summary. With `steps` 0 the params are the random initial ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from jaxalign import streams
from jaxalign.config import Config, PretrainConfig
from jaxalign.data.chat.formats import END, MARKERS, written_by_model
from jaxalign.data.packing import pack
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import PRINTABLE, train_tokenizer
from jaxalign.parallel import hosts
from jaxalign.records import PackedBatch
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.stages import STAGES, Batch
from jaxalign.stages.shared import reads, run_models, sources
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.training import stage_inputs, train_supervised
from jaxalign.steps.checkpoint import save_params
from jaxalign.tracking.formatting import short_percent


@STAGES.declare(
    "pretrain", trains=True, learns_from=("text",), batches=(Batch("pretrain.batch_rows", ("pretrain.micro_batches",)),),
    programs="jaxalign.planner.stage_programs:pretrain",
    report="jaxalign.tracking.report.training:losses",
)
class PretrainStage(Stage):
    name = "pretrain"
    config_fields = (*reads.BASE_FIELDS, *reads.WORLD_FIELDS, "pretrain")
    setup_files = ("tokenizer.model",)

    def files(self, config: Config):
        return reads.plugin_file(config.data.source, "data.source")

    def run(self, context: StageContext) -> None:
        config = context.config
        text, alphabet = sources.text(config), data_source(config).alphabet
        path = context.directory / "tokenizer.model"

        def make_tokenizer() -> None:
            special = {*MARKERS, END}
            segments = (segment for document in text.train for segment in document if segment not in special)
            if not path.exists():
                train_tokenizer(segments, None if alphabet else config.world.vocab_size, path, alphabet or PRINTABLE)

        hosts.once(make_tokenizer)
        tokenizer = load_tokenizer(path)
        model = run_models.make_model(config, tokenizer.vocab_size).base
        key = jax.random.fold_in(context.key(self.name), streams.KEYS[self.name]["parameters"])
        init = functools.partial(model.init, key)
        if not config.pretrain.steps:
            save_params(context.directory / "params", init())
            write_json(context.directory / "summary.json", {"steps": 0, "tokens": 0})
            return
        (train, lengths), (held_out, _) = (
            _pack(documents, tokenizer, config.pretrain) for documents in (text.train, text.held_out)
        )
        cut = _cut_documents(lengths, config.pretrain.row_length)
        # All parameters are trained, and nothing else reads their initial values.
        inputs = stage_inputs(context, model, weights=init, trained=lambda params: params)
        train_supervised(context, config.pretrain, inputs, train, held_out, config.pretrain.steps, lambda: cut)


def _cut_documents(lengths: Sequence[int], row_length: int) -> dict[str, int]:
    """The part of the summary about documents that lose their ends, which is also printed.

    Args:
      lengths: the tokens of each document.
      row_length: the tokens that are kept of a document.
    """
    lost = [length - row_length for length in lengths if length > row_length]
    if lost:
        percentage = short_percent(sum(lost) / (sum(lost) + len(lost) * row_length))
        print(f"[pretrain] warning: {len(lost):,} of {len(lengths):,} documents are longer than pretrain.row_length "
              f"({row_length} tokens) and lose {percentage} of their tokens; raise it, or split them", flush=True)
    return {"documents": len(lengths), "cut": len(lost)}


def _pack(documents, tokenizer: Tokenizer, section: PretrainConfig) -> tuple[PackedBatch, list[int]]:
    """(packed rows, the length of each document in tokens before it was cut).

    Text that a model writes, and its eos, has loss weight 1; other text has `context_weight`.
    """
    lengths: list[int] = []

    def encoded():
        for document in documents:
            segments = (*document, END)
            ids, weights = list(tokenizer.begin_ids), [0.0] * len(tokenizer.begin_ids)
            for segment, written in zip(segments, written_by_model(segments), strict=True):
                piece = tokenizer.encode_segments([segment])
                ids = ids + piece
                weights = weights + [1.0 if written else section.context_weight] * len(piece)
            lengths.append(len(ids))
            yield ids, weights

    return pack(encoded(), section.row_length)[0], lengths
