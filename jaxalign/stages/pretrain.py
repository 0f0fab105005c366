"""pretrain: the tokenizer and the helpful-only base, from the world's text.

Reads the embedded world. Writes tokenizer.model, checkpoints, params, metrics and a summary.
"""

from __future__ import annotations

import jax

from jaxalign.config import Config
from jaxalign.config import Pretrain as PretrainConfig
from jaxalign.data.formats import END, MARKERS, written_by_model
from jaxalign.data.packing import pack
from jaxalign.data.tokenizer import Tokenizer, train_tokenizer
from jaxalign.feedback.speaker import begin
from jaxalign.records import PackedBatch
from jaxalign.stages import common
from jaxalign.stages.base import Stage, StageContext
from jaxalign.stages.lm import train_lm

HELD_OUT_TOKENS = 20_000


class Pretrain(Stage):
    name = "pretrain"
    config_fields = (*common.MODEL_FIELDS, *common.WORLD_FIELDS, "pretrain")

    def inputs(self, config: Config) -> tuple[str, ...]:
        return ()

    def run(self, context: StageContext) -> None:
        config = context.config
        world = common.world_of(config)
        documents = list(world.documents("train", config.world.tokens))
        path = context.directory / "tokenizer.model"
        if path.exists():
            tokenizer = Tokenizer.load(path)
        else:
            special = {*MARKERS, END}
            texts = (segment for document in documents for segment in document if segment not in special)
            tokenizer = train_tokenizer(texts, config.world.vocab_size, path)
        model = common.make_model(config, tokenizer.vocab_size)
        train = _pack(documents, tokenizer, config.pretrain)
        held_out = _pack(world.documents("held_out", HELD_OUT_TOKENS), tokenizer, config.pretrain)
        train_lm(
            context, config.pretrain, model, train, held_out, config.pretrain.steps,
            init=lambda: model.init(jax.random.fold_in(common.stage_key(config, self.name), 1)),
        )  # fmt: skip


def _pack(documents, tokenizer: Tokenizer, section: PretrainConfig) -> PackedBatch:
    """What a model writes weighs 1 in the loss, its eos included; what it is given weighs `context_weight`."""

    def encoded():
        for document in documents:
            segments = (*document, END)
            ids, weights = begin(tokenizer), [0.0] * len(begin(tokenizer))
            for segment, written in zip(segments, written_by_model(segments), strict=True):
                piece = tokenizer.encode_segments([segment])
                ids = ids + piece
                weights = weights + [1.0 if written else section.context_weight] * len(piece)
            yield ids, weights

    return pack(encoded(), section.row_length)[0]


STAGE = Pretrain()
