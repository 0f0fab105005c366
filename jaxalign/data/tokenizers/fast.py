"""Tokenizers from tokenizer.json, the format of fast tokenizers in `transformers`, through the `tokenizers` library."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxalign.data.tokenizers.base import SPACE, Encoded, Tokenizer, special_ids
from jaxalign.data.tokenizers.files import TokenizerFiles
from jaxalign.errors import UserError
from jaxalign.json_text import parse_json

_BYTE_SPACE = "\u0120"  # Represents a space in byte-level pieces.
# Byte-level pieces represent each byte by a character: visible Latin-1 characters by themselves, others from U+0100 on.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}


class JsonTokenizer(Tokenizer):
    """A tokenizer.json with the settings of its folder."""

    def __init__(self, library: tokenizers.Tokenizer, files: TokenizerFiles):
        library.no_padding()
        library.no_truncation()
        _add_tokens(library, files)
        self._library = library
        library.encode_special_tokens = False
        begin = tuple(library.encode("", add_special_tokens=True).ids)
        self._special = {i: token.content for i, token in library.get_added_tokens_decoder().items() if token.special}
        self._unknown = None if "unk_token" not in files.named else library.token_to_id(files.named["unk_token"])
        ids = special_ids(files, library.token_to_id, {}, begin, self._special.keys() - {self._unknown})
        super().__init__(1 + max(library.get_vocab(with_added_tokens=True).values()), ids, files, library.token_to_id)
        if self.begin_ids and self.begin_ids[-1] == self.eos_id != self.bos_id:
            self.begin_ids = self.begin_ids[:-1]  # The library also adds eos to an empty text.
        self._spaces_first = (self._run("a", continues=False, special=False).tokens or [""])[0].startswith((SPACE, _BYTE_SPACE))

    @classmethod
    def load(cls, path: Path, files: TokenizerFiles) -> JsonTokenizer:
        """Reads a tokenizer.json. Raises UserError if the file cannot be read or has no end symbol."""
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exception.
            raise UserError(f"{path} is not a readable tokenizer.json ({str(error)[:200]}); "
                            "download or copy it again") from error
        return cls(library, files)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        encoding = self._run(text, continues, special=False)
        # Some vocabularies have special tokens as pieces; text that spells one is cut after one character.
        cut = self._first_cut(encoding, text)
        if cut is None:
            return encoding.ids
        return self.encode(text[:cut], continues) + self.encode(text[cut:], continues=True)

    def encode_template(self, text: str, continues: bool = False) -> Encoded:
        encoding = self._run(text, continues, special=True)
        return Encoded(encoding.ids, encoding.offsets)

    def cuts(self, text: str) -> list[int]:
        cuts: list[int] = []
        while True:
            start = cuts[-1] if cuts else 0
            cut = self._first_cut(self._run(text[start:], continues=start > 0, special=True), text[start:])
            if cut is None:
                return cuts
            cuts.append(start + cut)

    def decode(self, ids: Sequence[int], spaces: bool = False) -> str:
        known = [int(i) for i in ids if i < self.vocab_size and i not in self.special_ids]
        text = self._library.decode(known)
        return text if spaces else text.strip(" ")

    def piece(self, token: int) -> str:
        name = self._library.id_to_token(int(token))
        if name is None:
            return f"[{token}]"
        if token in self.special_ids:
            return name
        text = self._library.decode([int(token)], skip_special_tokens=False)
        if name == SPACE:
            return " "
        if "\ufffd" in text and all(c in _BYTES for c in name):
            return bytes(_BYTES[c] for c in name).decode("utf-8", "backslashreplace")
        if not text:
            return name
        return f" {text}" if name.startswith(SPACE) and not text.startswith(" ") else text

    def _encode_segment(self, text: str) -> list[int]:
        return self.encode(text, continues=self._spaces_first and text.startswith((" ", "\n")))

    def _first_cut(self, encoding: tokenizers.Encoding, text: str) -> int | None:
        """The position at which to cut the first piece of text that became a special token; None if there is none.

        The unknown token does not count if it represents unknown characters.
        """
        if self._special.keys().isdisjoint(encoding.ids):
            return None
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            taken = text[start:end].strip()
            if token not in self._special or (token == self._unknown and taken != self._special[token]):
                continue
            if len(taken) < 2:
                raise UserError(f"a text has {taken!r}, which the tokenizer in {self.files.folder} cannot distinguish from "
                                f"its special token {self._special[token]!r}; remove it")
            return start + text[start:end].index(taken) + 1
        return None

    def _run(self, text: str, continues: bool, special: bool) -> tokenizers.Encoding:
        library = self._inside if continues else self._library
        library.encode_special_tokens = not special
        return library.encode(text, add_special_tokens=False)

    @functools.cached_property
    def _inside(self) -> tokenizers.Tokenizer:
        """The same tokenizer for text that follows other text: it adds no space at the beginning."""
        if not self._spaces_first:
            return self._library
        whole = parse_json(self._library.to_str())
        whole["normalizer"] = _without_space(whole["normalizer"])
        whole["pre_tokenizer"] = _without_space(whole["pre_tokenizer"])
        return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _add_tokens(library: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Adds the tokens missing from the file, and marks tokens as special that the folder declares special or end tokens."""
    for number, token in files.added.items():
        if library.token_to_id(token.content) is None:
            library.add_tokens([tokenizers.AddedToken(token.content, special=token.special, normalized=False)])
        own = library.token_to_id(token.content)
        if own != number:
            raise UserError(f"the tokenizer in {files.folder} gives the added token {token.content!r} the id {number} in "
                            f"tokenizer_config.json or added_tokens.json, and {own} in tokenizer.json; download the "
                            "files again")
    added = library.get_added_tokens_decoder()
    ends = {added[i].content for i in files.eos_ids if i in added}
    for token in added.values():
        if token.content in ends.union(files.special) and not token.special:
            token.special = True
            library.add_special_tokens([token])
    known = {token.content for token in added.values()}
    plain = [content for content in files.special if content not in known and library.token_to_id(content) is not None]
    library.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False) for content in plain])


def _without_space(part: Any) -> Any:
    """A normalizer or pre-tokenizer of tokenizer.json, without the part that adds a space at the beginning of a text."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_without_space(item) for item in part[key]]
        return part | {key: [item for item in inner if item is not None]}
    if part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    return part | {"add_prefix_space": False} if "add_prefix_space" in part else part
