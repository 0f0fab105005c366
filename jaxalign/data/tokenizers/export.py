"""Exports this project's own tokenizers as tokenizer.json, which `transformers` loads with equal ids.

Handles the output of `sentence_piece.train_tokenizer`: BPE with pieces scored by the order of their merges, SentencePiece's
default normalisation, and no byte fallback. Control symbols become special tokens, which `transformers`, unlike SentencePiece,
also recognises in text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

_SPACE = "\u2581"
_BYTES, _NORMALIZER, _CHARSMAP = 2, 3, 2  # Wire type; fields of ModelProto and of its NormalizerSpec.


def tokenizer_files(path: Path) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json for a tokenizer.model from `train_tokenizer`."""
    model = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    special = [i for i in range(len(pieces)) if processor.is_control(i) or processor.is_unknown(i)]
    bos, unknown = processor.id_to_piece(processor.bos_id()), processor.id_to_piece(processor.unk_id())
    spec = next(value for field, value in _fields(model) if field == _NORMALIZER)
    charsmap = next((value for field, value in _fields(spec) if field == _CHARSMAP), b"")
    normalizers = [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}] if charsmap else []
    normalizers += [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": _SPACE},
        {"type": "Prepend", "prepend": _SPACE},
    ]
    content = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": pieces[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for i in special
        ],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [processor.bos_id()], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": False, "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": list(_merges(processor, pieces, set(special))),
        },
    }
    names = {"bos_token": bos, "eos_token": pieces[processor.eos_id()], "unk_token": unknown}
    names |= {"pad_token": pieces[processor.pad_id()]} if processor.pad_id() >= 0 else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    contents = {"tokenizer.json": content, "tokenizer_config.json": config}
    return {name: json.dumps(value, ensure_ascii=False, indent=1) + "\n" for name, value in contents.items()}


def _merges(processor: sentencepiece.SentencePieceProcessor, pieces: list[str], special: set[int]) -> Iterator[list[str]]:
    """Every pair of pieces that merges into a piece, best pieces first."""
    plain = {piece: processor.get_score(i) for i, piece in enumerate(pieces) if i not in special}
    for piece in sorted((piece for piece in plain if len(piece) > 1), key=plain.get, reverse=True):
        for cut in range(1, len(piece)):
            if piece[:cut] in plain and piece[cut:] in plain:
                yield [piece[:cut], piece[cut:]]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protocol buffer message: (number, content)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == _BYTES:
            size = varint()
            yield key >> 3, message[at : at + size]
            at += size
        elif kind == 0:
            varint()
        else:
            at += {1: 8, 5: 4}[kind]
