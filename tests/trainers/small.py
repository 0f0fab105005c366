"""The language model and the data that the tests of trainers share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import jax

from jaxalign.config import Mesh
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.data.tokenizers.sentence_piece import train_tokenizer
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.language_model import LanguageModel
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding

COLOURS = ("red", "green", "blue", "white", "black", "grey")
PAIRS = [{"prompt": f"Name the colour {c}.", "chosen": f"It is {c}.", "rejected": "No, never."} for c in COLOURS]
EXAMPLES = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
    for row in PAIRS
    for kind in ("chosen", "rejected")
]


@functools.cache
def tokenizer():
    """A SentencePiece tokenizer of a few hundred pieces."""
    path = Path(tempfile.mkdtemp()) / "tokenizer.model"
    texts = [text for row in PAIRS for text in row.values()]
    train_tokenizer(texts * 4, 120, path)
    return load_tokenizer(path)


@functools.cache
def language_model(lora: bool = False, mesh: Mesh | None = None) -> LanguageModel:
    """A decoder of one layer and width 16 with random weights, with or without adapters."""
    words = tokenizer()
    decoder = DecoderConfig(vocab=words.vocab_size, layers=1, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24)
    model = Model(decoder, "lm", make_sharding(mesh or Mesh()))
    params = model.init(jax.random.key(0))
    if not lora:
        return LanguageModel(model, params, words, "plain", 64)
    adapted = Model(decoder, "lm", model.sharding, LoraAdapters(2, 4.0, ("*",)))
    return LanguageModel(adapted, adapted.init_adapters(params, jax.random.key(1)), words, "plain", 64, params)
