"""What a model folder is: its family, size, kind of text and chat template."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax

from jaxalign.config import Config, Mesh, ModelConfig
from jaxalign.config.finished import tokenizer_path
from jaxalign.data.chat import encoding
from jaxalign.data.chat.model_style import model_style
from jaxalign.data.chat.styles import THINKING as DELIMITERS
from jaxalign.data.tokenizers.files import THINKING
from jaxalign.data.tokenizers.load import Tokenizer, load_tokenizer
from jaxalign.errors import UserError
from jaxalign.models.checkpoints.huggingface import check_vocabulary
from jaxalign.models.configured import base_config
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.shapes import policy_model

BASE, CHAT, THINKS, ALWAYS_THINKS, MARKED = "base", "chat", "thinking", "always thinking", "marked"
KINDS = {
    BASE: "a base model (no chat template), so dialogues are written as transcripts and the judge sees examples",
    CHAT: "a chat model",
    THINKS: "a reasoning model, whose thoughts the config turns off",
    ALWAYS_THINKS: "a reasoning model whose template has no switch, so its answers contain thoughts, which are cut off",
    MARKED: "a model with jaxalign's markers, which judges in the words that stage pretrain taught it",
}
"""The kinds of models, and what the written config does about each."""
UNLIMITED = 2048
"""The positions of a model whose config.json gives no limit."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model folder.

    Attributes:
      folder: its absolute path.
      family: the model_type.
      parameters: the number of weights.
      positions: the maximum length of a text, in tokens.
      kind: one of `KINDS`.
      ends: the token that ends an answer in the chat template; None without a template.
    """

    folder: Path
    family: str
    parameters: int
    positions: int
    kind: str
    ends: str | None = None


def read_facts(folder: str | Path) -> ModelFacts:
    """Reads config.json, the tokenizer and the chat template; no weights.

    Args:
      folder: a folder in Hugging Face format, or a finished stage of a run that trained a language model.

    Raises:
      UserError: the folder is neither, its family is not supported, it has no tokenizer, the tokenizer does not fit the
        weights, or its chat template cannot write an answered question.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise UserError(f"--model={folder} is not a folder; give the folder that has the model's config.json, weights and "
                        "tokenizer")
    config = dataclasses.replace(Config(), model=ModelConfig(source="huggingface", path=str(path)))
    checkpoint = base_config(config, Path())
    if checkpoint.head != "lm":
        raise UserError(f"--model={folder} is a {checkpoint.family.classifier}, which scores texts; give a language model")
    tokenizer = load_tokenizer(tokenizer_path(config, Path()))
    check_vocabulary(path, checkpoint, tokenizer)
    model = policy_model(config, abstract_sharding(Mesh()))
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract()))
    positions = UNLIMITED if checkpoint.max_positions is None else checkpoint.max_positions
    style = model_style(config)
    facts = ModelFacts(path, checkpoint.family.model_type, parameters, positions, _kind(tokenizer, style))
    if style != "chat":
        return facts
    encoding.encode_answer(tokenizer, "Because.")  # Raises UserError if the template cannot write a question with its answer.
    return dataclasses.replace(facts, ends=tokenizer.piece(encoding.stop_ids(tokenizer)[0]))


def _kind(tokenizer: Tokenizer, style: str) -> str:
    """The kind of a model, by its prompt style and its chat template."""
    template = tokenizer.files.chat_template or ""
    if style != "chat":
        return MARKED if style == "compact" else BASE
    if THINKING in template:
        return THINKS
    return ALWAYS_THINKS if DELIMITERS[0] in template else CHAT
