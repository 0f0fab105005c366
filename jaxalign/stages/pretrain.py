"""pretrain: the tokenizer and the helpful-only base, from the text of the embedded world or of worked arithmetic.

Writes tokenizer.model, checkpoints, params, metrics and a summary. With `steps` 0 the params are the random ones.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.config import Pretrain as PretrainConfig
from jaxalign.data.chat.formats import ASSISTANT, END, MARKERS, USER, written_by_model
from jaxalign.data.packing import pack
from jaxalign.data.sources.arithmetic import ALPHABET
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import PRINTABLE, train_tokenizer
from jaxalign.parallel import hosts
from jaxalign.records import PackedBatch
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import Stage, StageContext, write_json
from jaxalign.stages.shared.lm import train_lm
from jaxalign.training.checkpoint import save_params

HELD_OUT_TOKENS = 20_000


class Pretrain(Stage):
    name = "pretrain"
    config_fields = (*common.BASE_FIELDS, *common.WORLD_FIELDS, "pretrain")
    setup_files = ("tokenizer.model",)

    def inputs(self, config: Config) -> tuple[str, ...]:
        return ()

    def run(self, context: StageContext) -> None:
        config = context.config
        train, held_out, size, alphabet = _text(config)
        path = context.directory / "tokenizer.model"

        def make_tokenizer() -> None:
            special = {*MARKERS, END}
            texts = (segment for document in train for segment in document if segment not in special)
            if not path.exists():
                train_tokenizer(texts, size, path, alphabet)

        hosts.once(make_tokenizer)
        tokenizer = load_tokenizer(path)
        model = common.make_model(config, tokenizer.vocab_size).base
        key = jax.random.fold_in(common.stage_key(config, self.name), streams.KEYS[self.name]["parameters"])
        init = functools.partial(model.init, key)
        if not config.pretrain.steps:
            save_params(context.directory / "params", init())
            write_json(context.directory / "summary.json", {"steps": 0, "tokens": 0})
            return
        train, held_out = (_pack(documents, tokenizer, config.pretrain) for documents in (train, held_out))
        train_lm(context, config.pretrain, model, train, held_out, config.pretrain.steps, init)


def _text(config: Config):
    """(training documents, held-out documents, size of the vocabulary, characters it must cover)."""
    if config.data.source != "arithmetic":
        world = common.world_of(config)
        train = list(world.documents("train", config.world.tokens))
        return train, world.documents("held_out", HELD_OUT_TOKENS), config.world.vocab_size, PRINTABLE
    problems, rng = common.arithmetic_of(config), np.random.default_rng([config.seed, streams.DATA["arithmetic examples"]])
    worked = lambda split: [(USER, text, ASSISTANT, answer) for text, answer in problems.problems(split)]  # noqa: E731
    train = worked("train")
    drawn = [train[i] for i in rng.integers(len(train), size=config.arithmetic.examples)]
    return drawn, worked("held_out") or train, None, ALPHABET


def _pack(documents, tokenizer: Tokenizer, section: PretrainConfig) -> PackedBatch:
    """What a model writes weighs 1 in the loss, its eos included; what it is given weighs `context_weight`."""

    def encoded():
        for document in documents:
            segments = (*document, END)
            ids, weights = list(tokenizer.begin_ids), [0.0] * len(tokenizer.begin_ids)
            for segment, written in zip(segments, written_by_model(segments), strict=True):
                piece = tokenizer.encode_segments([segment])
                ids = ids + piece
                weights = weights + [1.0 if written else section.context_weight] * len(piece)
            yield ids, weights

    return pack(encoded(), section.row_length)[0]


STAGE = Pretrain()
