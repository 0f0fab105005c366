"""Tiny language models in Hugging Face layout, for tests of the Python API."""

from __future__ import annotations

import pathlib

import jax

from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from jaxalign.models.model import Model
from tests import made_tokenizers

MAX_LENGTH = 128


def write_model(
    folder: pathlib.Path, template: str | None = made_tokenizers.CHATML, max_length: int = MAX_LENGTH, embed: int = 16
) -> pathlib.Path:
    """Write a random Llama of 2 layers and width `embed` with a tokenizer to `folder`, and return `folder`."""
    texts = made_tokenizers.qwen(folder.parent / f"{folder.name}_tokenizer", template)
    tokenizer = load_tokenizer(texts)
    model = Model(DecoderConfig(tokenizer.vocab_size, 2, embed, 4, 2, 4, 20))
    raw = config_json(model.config, max_length) | {"eos_token_id": tokenizer.eos_id, "bos_token_id": None}
    export(folder, model, model.init(jax.random.key(0)), config=raw, source=texts)
    return folder
