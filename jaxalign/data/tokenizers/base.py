"""The interface of all tokenizers, independent of the library that implements them.

There are two ways to encode. In *text*, a spelled-out special token is ordinary characters. In a rendered *template*, it
becomes the token. Only `encode_template` turns characters into special tokens.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from jaxalign.data.chat.formats import END, MARKERS
from jaxalign.data.tokenizers.files import TokenizerFiles
from jaxalign.errors import UserError

SPACE = "\u2581"
"""The character that represents a space in pieces."""


class Encoded(NamedTuple):
    """Token ids, and for each id the span (start, end) of characters that it covers, which may be empty."""

    ids: list[int]
    spans: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The special ids of a tokenizer. `begin` starts every sequence; `controls` are never text."""

    bos: int | None
    eos: int | None
    pad: int | None
    begin: tuple[int, ...]
    controls: frozenset[int]


def special_ids(
    files: TokenizerFiles,
    token_id: Callable[[str], int | None],
    own: Mapping[str, int | None],
    begin: tuple[int, ...] | None,
    controls: Iterable[int],
) -> SpecialIds:
    """The ids that start, end and pad sequences.

    A token named by the folder takes precedence, then the tokenizer's own file, then the model's config. A named token that is
    not in the vocabulary is ignored, because it has no embedding. If the folder declares that there is no bos or pad, there is
    none.

    Args:
        files: the settings of the folder.
        token_id: returns the id of a token, or None if it is not in the vocabulary.
        own: the ids in the tokenizer's own file, by "bos", "eos" and "pad".
        begin: the ids with which the tokenizer's own file starts a text; None: bos, if there is one.
        controls: ids that are never text.
    """
    ids = {}
    for part in ("bos", "eos", "pad"):
        name = f"{part}_token"
        known = token_id(files.named[name]) if name in files.named else None
        silent = name not in files.settled or part == "eos"
        ids[part] = own.get(part) if known is None and silent else known
    if ids["eos"] is None and files.eos_ids:
        ids["eos"] = files.eos_ids[0]
    if ids["bos"] is None and not files.settled:
        ids["bos"] = files.bos_id
    bos = () if ids["bos"] is None else (ids["bos"],)
    if files.add_bos is not None:
        begin = bos if files.add_bos else ()
    return SpecialIds(ids["bos"], ids["eos"], ids["pad"], bos if begin is None else begin, frozenset(controls))


class Tokenizer(abc.ABC):
    """Converts text to ids and back.

    Attributes:
        vocab_size: the highest id plus 1, including added tokens. The embedding may be larger.
        bos_id: the id of the beginning-of-sequence token, or None.
        eos_id: the id of the end-of-sequence token.
        pad_id: the id of the pad token, or else eos. Masks do not depend on it; they come from lengths.
        begin_ids: the ids that start every sequence: bos, or none for a model trained without bos.
        stop_ids: eos, then the other end tokens in the model's config (chat models often have two).
        special_ids: every id that is not text. Decoding skips these ids, and text never becomes one of them.
        files: the folder's settings: names of special tokens, chat template.
    """

    def __init__(
        self, vocab_size: int, ids: SpecialIds, files: TokenizerFiles, token_id: Callable[[str], int | None]
    ):
        if ids.eos is None:
            raise UserError("the tokenizer has no end-of-sequence symbol, which is needed to end an answer")
        self.vocab_size, self.files = vocab_size, files
        self.bos_id, self.eos_id = ids.bos, ids.eos
        self.pad_id: int = ids.eos if ids.pad is None else ids.pad
        self.begin_ids = ids.begin
        self.stop_ids = tuple(dict.fromkeys((ids.eos, *files.eos_ids)))
        self.special_ids = ids.controls | {i for i in (ids.bos, ids.eos, ids.pad) if i is not None}
        markers = {marker: token_id(marker) for marker in MARKERS}
        self._markers = {END: ids.eos} | {marker: i for marker, i in markers.items() if i is not None}

    def with_variables(self, variables: Mapping[str, Any]) -> Self:
        """This tokenizer with further variables of its chat template, in place of those that it has."""
        tokenizer = copy.copy(self)
        tokenizer.files = dataclasses.replace(self.files, variables=dict(variables))
        return tokenizer

    @property
    def names(self) -> dict[str, str]:
        """Special tokens by role ("bos_token"), for chat templates: those of the folder, or else of the tokenizer."""
        known = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        names = {part: self.piece(token) for part, token in known.items() if token is not None}
        return names | dict(self.files.named)

    @abc.abstractmethod
    def encode(self, text: str, continues: bool = False) -> list[int]:
        """The ids of plain text at the beginning of a sequence, without bos, eos and markers.

        With `continues`, the text follows other text, so no space is added before its first word.
        """

    @abc.abstractmethod
    def encode_template(self, text: str, continues: bool = False) -> Encoded:
        """The ids of a rendered template, in which special tokens are spelled out. No tokens are added before or after it.

        With `continues`, the text follows other text, so no space is added before its first word.
        """

    @abc.abstractmethod
    def cuts(self, text: str) -> list[int]:
        """Positions at which to cut a message in a template so that no part of it becomes a special token; usually empty.

        Raises:
            UserError: the text contains a special token of one character, which cannot be cut.
        """

    @abc.abstractmethod
    def decode(self, ids: Sequence[int], spaces: bool = False) -> str:
        """The text of ids. Special tokens (bos, eos, pad, markers) have no text.

        Leading and trailing spaces are removed unless `spaces` is set.
        """

    def decode_raw(self, ids: Sequence[int]) -> str:
        """The text of ids with the names of special tokens, without spaces next to these."""
        runs = itertools.groupby(ids, lambda token: token in self.special_ids)
        return "".join("".join(map(self.piece, run)) if special else self.decode(list(run)) for special, run in runs)

    @abc.abstractmethod
    def piece(self, token: int) -> str:
        """One token in readable form: its text, or its name if it is special or only part of a character."""

    @abc.abstractmethod
    def _encode_segment(self, text: str) -> list[int]:
        """The ids of a segment that follows other text. A tokenizer that adds a space before the first word of a text also adds
        one before a segment, unless the segment begins with a line break or a space."""

    def encode_segments(self, segments: Sequence[str]) -> list[int]:
        """The ids of segments, each encoded separately, without bos and final eos. Markers and `END` become one id each."""
        ids: list[int] = []
        for segment in segments:
            if segment in self._markers:
                ids.append(self._markers[segment])
            else:
                ids += self._encode_segment(segment)
        return ids

    def marker_id(self, marker: str) -> int:
        """The id of a marker, such as one of `formats.OPTIONS`.

        Raises:
            UserError: the marker is not in the vocabulary.
        """
        if marker not in self._markers:
            raise UserError(
                f"the tokenizer has no symbol {marker!r}; critiques and comparisons need one with jaxalign's markers"
            )
        return self._markers[marker]
