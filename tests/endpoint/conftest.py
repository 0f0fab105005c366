"""The server that the tests of endpoints share. Without the extra "endpoint", these tests are skipped."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import pytest

from jaxalign.data.tokenizers import chatml
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.models.checkpoints.export import export
from jaxalign.models.families.llama import config_json
from tests import tiny
from tests.endpoint.gguf_file import write_gguf
from tests.endpoint.servers import Direct, llama_cpp

for _library in ("aiohttp", "aiolimiter", "stamina"):
    pytest.importorskip(_library)


class TinyServer(NamedTuple):
    """A running server. server: sends requests to it. model: the folder of the model that it serves."""

    server: Direct
    model: pathlib.Path


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory) -> Iterator[TinyServer]:
    """llama.cpp with a random chat model; skips the test if a package is missing."""
    missing = [name for name in ("gguf", "xllamacpp") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed; pip install 'jaxalign[endpoint-test]'")
    folder = tmp_path_factory.mktemp("endpoint")
    write_chat_model(folder / "model")
    write_gguf(folder / "model", folder / "model.gguf")
    with llama_cpp(folder / "model.gguf") as url:
        yield TinyServer(Direct(url), folder / "model")


def write_chat_model(folder: pathlib.Path) -> None:
    """Writes a random Llama with a byte-level BPE tokenizer and the ChatML template, in the layout of Hugging Face."""
    files = chatml.train_files(["Which answer is better, A or B? Answer A is better. Answer B is shorter."] * 2, 320)
    scratch = folder.with_name("tokenizer")
    scratch.mkdir()
    for name, text in files.items():
        (scratch / name).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(scratch)
    model = tiny.model(layers=2, vocab=tokenizer.vocab_size, head_dim=16, embed=32)
    # llama.cpp shows no log-probabilities of a reply that consists of part of a character. With this seed, replies to the
    # tests' requests begin with whole characters.
    params = jax.tree.map(lambda x: x * 1.3, model.init(jax.random.key(3)))
    fields = config_json(model.config, 512)
    fields |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    export(folder, model, params, config=fields, files=files)
