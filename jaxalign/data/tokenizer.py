"""SentencePiece tokenizers: loading any `.model`, and training the project's own on the world's text.

Text is encoded segment by segment (see `formats`). A segment that is one of the format's markers becomes that marker's
one id where the vocabulary has it; markers are control symbols, which SentencePiece never matches inside text.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from jaxalign.data.formats import END, MARKERS
from jaxalign.errors import UserError

_SPACE = "\u2581"


class Tokenizer:
    """A SentencePiece model with segment-wise encoding.

    Attributes:
        vocab_size: number of ids.
        bos_id, eos_id: ids of the begin and end symbols; `bos_id` is None where the model has none.
        pad_id: the model's pad where it has one, else eos. Masks never look at it: they come from lengths.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor):
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.bos_id: int | None = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_id: int = processor.eos_id()
        if self.eos_id < 0:
            raise UserError("the tokenizer has no end-of-sequence symbol; one is needed to end an answer")
        self.pad_id: int = processor.pad_id() if processor.pad_id() >= 0 else self.eos_id
        self._markers = {END: self.eos_id}
        for marker in MARKERS:
            piece = processor.piece_to_id(marker)
            if piece != processor.unk_id():
                self._markers[marker] = piece

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a SentencePiece `.model` file.

        Raises:
            UserError: if the file is missing, is no SentencePiece model, or has no end-of-sequence symbol.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"tokenizer {path} does not exist; give the path of a SentencePiece .model file")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except Exception as error:  # SentencePiece raises RuntimeError or its own types, by version
            raise UserError(f"tokenizer {path} is not a readable SentencePiece model; it may be cut short") from error
        return cls(processor)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, as at the beginning of a text; no bos, no eos, no markers."""
        return self._processor.encode(text)

    def encode_segments(self, segments: Sequence[str]) -> list[int]:
        """The ids of segments, each encoded on its own. Markers and `END` become their one id; no bos, no final eos."""
        ids: list[int] = []
        for segment in segments:
            if segment in self._markers:
                ids.append(self._markers[segment])
            else:
                ids += self._encode_segment(segment)
        return ids

    def marker_id(self, marker: str) -> int:
        """The id of a marker (`formats.OPTIONS`, say).

        Raises:
            UserError: if the vocabulary does not hold it.
        """
        if marker not in self._markers:
            raise UserError(
                f"the tokenizer has no symbol {marker!r}; critiques and comparisons need one with jaxalign's markers"
            )
        return self._markers[marker]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Control symbols (bos, eos, pad, markers) have no text."""
        return self._processor.decode([int(i) for i in ids]).strip(" ")

    def _encode_segment(self, text: str) -> list[int]:
        """A segment is a continuation: its first word takes one space before it, a line break takes none."""
        if text.startswith("\n"):
            ids = self._processor.encode(text)
            # SentencePiece puts a space before every text; before a line break it stands alone and is dropped.
            return ids[1:] if ids and self._processor.id_to_piece(ids[0]) == _SPACE else ids
        return self._processor.encode(text.removeprefix(" "))


PRINTABLE = "".join(chr(code) for code in range(33, 127))
"""The visible characters of ASCII."""


def train_tokenizer(texts: Iterable[str], vocab_size: int | None, path: str | Path, alphabet: str = PRINTABLE) -> Tokenizer:
    """Trains the project's own tokenizer (BPE, markers as single symbols) and writes it to `path` in one move.

    The same texts and size give the same file: one thread, no sampling. The alphabet is always covered (printable ASCII, so
    that any English text can be encoded); other characters become the unknown symbol.

    Args:
        texts: plain text lines, without markers.
        vocab_size: number of ids, markers included; None: no more than markers, specials and single characters.
        alphabet: characters that are covered even where the texts lack them.
        path: where the `.model` goes.

    Raises:
        UserError: if the texts do not support that vocabulary size.
    """
    path = Path(path)
    model = io.BytesIO()
    if vocab_size is None:  # The four specials, and the mark of a space.
        vocab_size = len(MARKERS) + 4 + 1 + len(set(alphabet))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            character_coverage=1.0,
            required_chars=alphabet,
            control_symbols=list(MARKERS),
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            pad_piece="<pad>",
            num_threads=1,
            input_sentence_size=0,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(f"cannot train a tokenizer of {vocab_size} symbols on this text: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    temporary.write_bytes(model.getvalue())
    os.replace(temporary, path)
    return Tokenizer.load(path)
