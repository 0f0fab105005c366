"""Loads a tokenizer, SentencePiece (`.model`) or `tokenizer.json`, with the settings of its folder."""

from __future__ import annotations

import os
from pathlib import Path

from jaxalign.config import Config
from jaxalign.config.finished import tokenizer_path
from jaxalign.data.tokenizers.base import Tokenizer
from jaxalign.data.tokenizers.fast import JsonTokenizer
from jaxalign.data.tokenizers.files import TokenizerFiles, read_tokenizer_files, thinking_variables
from jaxalign.data.tokenizers.sentence_piece import SentencePieceTokenizer
from jaxalign.errors import UserError

__all__ = ["Tokenizer", "load_run_tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a folder in Hugging Face layout, or a single file.

    A folder also provides special tokens, added tokens and a chat template (`data.tokenizers.files`); a single file does not.
    If a folder has both files, tokenizer.json is used, as in `transformers`: servers use it, and it may have tokens that the
    `.model` lacks.

    Raises:
        UserError: there is no tokenizer, a file is damaged, or there is no end-of-sequence token.
    """
    path = Path(path).expanduser()
    files = TokenizerFiles(str(path.parent))
    if os.path.isdir(path):  # Unlike Path.is_dir, False also for a name that is too long.
        files = read_tokenizer_files(path)
        file = next((path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"{path} has no tokenizer: neither tokenizer.json nor tokenizer.model exists; add the model's "
                            "tokenizer files")
        path = file
    if not os.path.isfile(path):
        raise UserError(f"tokenizer {path} does not exist; give a folder with tokenizer.json or tokenizer.model, or the file")
    try:
        return (JsonTokenizer if path.suffix == ".json" else SentencePieceTokenizer).load(path, files)
    except UserError:
        raise
    except Exception as error:  # The libraries accept some damaged files, and fail when these are used.
        raise UserError(f"tokenizer {path} is damaged ({type(error).__name__}: {error}); download or copy it again") from error


def load_run_tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """The tokenizer of the run in `workdir`, whose chat template has the variables of `config.data.thinking`."""
    return load_tokenizer(tokenizer_path(config, workdir)).with_variables(thinking_variables(config.data.thinking))
