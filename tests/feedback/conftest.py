"""Tokenizers of chat models, shared by the tests of this folder."""

from __future__ import annotations

import pytest

from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from tests import made_tokenizers


@pytest.fixture(scope="session")
def chat_tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """A tokenizer with a chat template in the manner of each family."""
    root = tmp_path_factory.mktemp("chat")
    kinds = {"llama3": made_tokenizers.llama3, "qwen2": made_tokenizers.qwen, "gemma": made_tokenizers.unigram,
             "mistral": made_tokenizers.llama2}
    for name in (*kinds, "qwen3"):
        (root / name).mkdir()
    folders = {name: make(root / name) for name, make in kinds.items()}
    folders["qwen3"] = made_tokenizers.qwen(root / "qwen3", made_tokenizers.QWEN3)
    return {name: load_tokenizer(folder) for name, folder in folders.items()}
