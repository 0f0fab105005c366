"""Exports SentencePiece tokenizers as tokenizer.json, which `transformers` loads with equal ids.

The ids are compared before anything is written. Special tokens are the exception: `transformers`, unlike SentencePiece, also
recognises them in text.
"""

from __future__ import annotations

import base64
import json
import logging
import random
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2

from jaxalign.data.sources.jsonl import read_object
from jaxalign.data.tokenizers.base import SPACE, Tokenizer
from jaxalign.data.tokenizers.files import TokenizerFiles, read_tokenizer_files
from jaxalign.data.tokenizers.sentence_piece import SentencePieceTokenizer

_JSON, _SETTINGS, _MODEL = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
_PROBES = ("", " ", "the cat sat", " the cat ", "a  dog   ran", "x\ny", "\n\nx\t y", "12345",
           "\u00fc \u4e2d\u6587 \ufb01ne \u00bd", "\U0001f98a")
_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


def folder_files(folder: Path) -> dict[str, str]:
    """`tokenizer_files` of a folder that has a tokenizer.model and no tokenizer.json; empty for any other folder."""
    wanted = (folder / _MODEL).is_file() and not (folder / _JSON).exists()
    return tokenizer_files(folder / _MODEL, read_tokenizer_files(folder)) if wanted else {}


def tokenizer_files(path: Path, files: TokenizerFiles | None = None) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json for a SentencePiece model.

    Args:
      path: the `.model`.
      files: the settings of its folder, if they count.

    Returns:
      Text by file name. Empty, with a warning, if no tokenizer.json gives equal ids.
    """
    tokenizer = SentencePieceTokenizer.load(path, files or TokenizerFiles(str(path.parent)))
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    content = json.dumps(_content(model, tokenizer), ensure_ascii=False, indent=1) + "\n"
    if (text := _difference(content, model, tokenizer)) is not None:
        logging.getLogger("jaxalign").warning(
            "%s is exported without a tokenizer.json, because none gives the same ids for %r; other programs may give others",
            path, text)
        return {}
    known = read_object(path.with_name(_SETTINGS)) if files is not None and path.with_name(_SETTINGS).is_file() else {}
    # `transformers` would build a tokenizer by the class of the model instead of reading tokenizer.json.
    known = {name: value for name, value in known.items() if name not in ("legacy", "sp_model_kwargs", "auto_map")}
    names = tokenizer.names | {"unk_token": tokenizer.piece(model.trainer_spec.unk_id)}
    names |= {"pad_token": tokenizer.piece(tokenizer.pad_id)} if tokenizer.pad_id != tokenizer.eos_id else {}
    config = known | {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    return {_JSON: content, _SETTINGS: json.dumps(config, ensure_ascii=False, indent=1) + "\n"}


def _content(model: sentencepiece_model_pb2.ModelProto, tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The fields of tokenizer.json."""
    special = {i: piece.piece for i, piece in enumerate(model.pieces) if piece.type in (_Piece.CONTROL, _Piece.UNKNOWN)}
    plain = {i: piece.piece for i, piece in enumerate(model.pieces) if piece.type == _Piece.USER_DEFINED}
    for i, token in tokenizer.files.added.items():
        (special if i in tokenizer.special_ids else plain).setdefault(i, token.content)
    begin = [{"SpecialToken": {"id": tokenizer.piece(i), "type_id": 0}} for i in tokenizer.begin_ids]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    normalizer, before = _spaces(model.normalizer_spec, tokenizer.files.legacy)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": i in special} for i, content in sorted((special | plain).items())
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "pre_tokenizer": before,
        "post_processor": {
            "type": "TemplateProcessing", "single": [*begin, text],
            "pair": [*begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                tokenizer.piece(i): {"id": tokenizer.piece(i), "ids": [i], "tokens": [tokenizer.piece(i)]}
                for i in tokenizer.begin_ids
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": _model(model),
    }


def _spaces(spec: sentencepiece_model_pb2.NormalizerSpec, legacy: bool) -> tuple[list[dict], dict | None]:
    """The normalizers, and the pre-tokenizer. legacy: every part of a text after a special token begins with a space."""
    charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
    steps: list[dict] = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
    if spec.remove_extra_whitespaces:
        # The normalizer Strip would also remove line breaks.
        steps += [{"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}]
    pattern = {"Regex": " +"} if spec.remove_extra_whitespaces else {"String": " "}
    steps += [{"type": "Replace", "pattern": pattern, "content": SPACE}]
    if not spec.add_dummy_prefix:
        return steps, None
    if legacy:
        return [*steps, {"type": "Prepend", "prepend": SPACE}], None
    # Metaspace adds nothing before its own replacement, so a space is added first, and then replaced.
    first = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first", "split": False}
    then = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
    return steps, {"type": "Sequence", "pretokenizers": [first, then]}


def _model(model: sentencepiece_model_pb2.ModelProto) -> dict[str, Any]:
    spec, pieces = model.trainer_spec, model.pieces
    if spec.model_type == spec.UNIGRAM:
        return {"type": "Unigram", "unk_id": spec.unk_id, "byte_fallback": spec.byte_fallback,
                "vocab": [[piece.piece, piece.score] for piece in pieces]}
    # Every pair of pieces that merges into a piece, best pieces first.
    plain = {piece.piece: piece.score for piece in pieces if piece.type == _Piece.NORMAL}
    longer = sorted((piece for piece in plain if len(piece) > 1), key=plain.get, reverse=True)
    merges = [[piece[:cut], piece[cut:]] for piece in longer for cut in range(1, len(piece))
              if piece[:cut] in plain and piece[cut:] in plain]
    return {
        "type": "BPE", "dropout": None, "unk_token": pieces[spec.unk_id].piece, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": spec.byte_fallback, "ignore_merges": False,
        "vocab": {piece.piece: i for i, piece in enumerate(pieces)}, "merges": merges,
    }


def _difference(content: str, model: sentencepiece_model_pb2.ModelProto, tokenizer: Tokenizer) -> str | None:
    """A text whose ids differ, among every piece and random sequences of pieces; None if there is none."""
    library = tokenizers.Tokenizer.from_str(content)
    words = [piece.piece.replace(SPACE, " ") for piece in model.pieces if piece.type in (_Piece.NORMAL, _Piece.USER_DEFINED)]
    choose = random.Random(0)
    texts = [*_PROBES, *words, *("".join(choose.choices(words, k=30)) for _ in range(500 if words else 0))]
    texts = [text for text in texts if not tokenizer.cuts(text)]
    found = library.encode_batch(texts, add_special_tokens=False)
    wrong = [text for text, own in zip(texts, found, strict=True) if own.ids != tokenizer.encode(text)]
    end = tokenizer.piece(tokenizer.eos_id)
    dialogues = [f"{end}{text}{end}\n{text}" for text in texts[: len(_PROBES)]]
    wrong += [text for text in dialogues
              if library.encode(text, add_special_tokens=False).ids != tokenizer.encode_template(text).ids]
    return wrong[0] if wrong else None
