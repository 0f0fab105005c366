"""SentencePiece tokenizers: any `.model`, and the project's own, trained on the world's text.

Text is encoded segment by segment (see `data.chat.formats`). A segment that equals a marker becomes the marker's id if the
vocabulary has the marker. Markers are control symbols, which SentencePiece never matches inside text.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from jaxalign.data.chat.formats import MARKERS
from jaxalign.data.tokenizers.base import SPACE, Encoded, Tokenizer, special_ids
from jaxalign.data.tokenizers.files import TokenizerFiles
from jaxalign.errors import UserError

# A normalizer_spec (field 3) with add_dummy_prefix (3) and remove_extra_whitespaces (4) off. Appended to a serialised model,
# it overrides these two settings, because protocol buffers merge.
_KEEP_SPACES = b"\x1a\x04\x18\x00\x20\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with the added tokens of its folder."""

    def __init__(self, model: bytes, files: TokenizerFiles):
        self._model, self._processor = model, sentencepiece.SentencePieceProcessor(model_proto=model)
        processor, pieces = self._processor, self._processor.vocab_size()
        self._added = {i: token.content for i, token in files.added.items() if i >= pieces}
        self._added_ids = {content: i for i, content in self._added.items()}
        for i, token in files.added.items():
            if i < pieces and processor.id_to_piece(i) != token.content:
                raise UserError(f"the tokenizer in {files.folder} assigns the id {i} to {processor.id_to_piece(i)!r} in "
                                f"tokenizer.model, and to {token.content!r} in its added tokens; download the "
                                "files again")
        controls = {processor.id_to_piece(i): i for i in range(pieces) if processor.is_control(i)}
        named = {content: self._token_id(content) for content in files.special}
        self._special = {content: i for content, i in (controls | named).items() if i is not None}
        own = {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id()}
        own = {part: i if i >= 0 else None for part, i in own.items()}
        size = 1 + max([pieces - 1, *self._added])
        unknown = {processor.unk_id()}
        ids = special_ids(files, self._token_id, own, None, {*self._special.values()} - unknown)
        super().__init__(size, ids, files, self._token_id)
        plain = [content for content in self._added_ids if content not in self._special]
        self._plain_added, self._specials = _alternatives(plain), _alternatives(self._special)
        self._any_special = _alternatives([*self._special, *plain])

    @classmethod
    def load(cls, path: Path, files: TokenizerFiles) -> SentencePieceTokenizer:
        """Reads a `.model`. Raises UserError if it is not a SentencePiece model or has no end-of-sequence symbol."""
        try:
            model = path.read_bytes()
            sentencepiece.SentencePieceProcessor(model_proto=model).encode("a")  # Fails with an empty model.
        except Exception as error:  # SentencePiece raises RuntimeError or its own types, depending on the version.
            raise UserError(f"tokenizer {path} is not a readable SentencePiece model; it may be truncated") from error
        return cls(model, files)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        if self._plain_added is None and not continues:
            return self._processor.encode(text)
        return self._encode_parts(text, self._plain_added, continues).ids

    def encode_template(self, text: str, continues: bool = False) -> Encoded:
        return self._encode_parts(text, self._any_special, continues)

    def cuts(self, text: str) -> list[int]:
        cuts: list[int] = []
        while self._specials is not None and (match := self._specials.search(text, cuts[-1] if cuts else 0)):
            if len(match[0]) < 2:
                raise UserError(f"a text has {match[0]!r}, which the tokenizer in {self.files.folder} cannot distinguish "
                                "from its special token; remove it")
            cuts.append(match.start() + 1)
        return cuts

    def decode(self, ids: Sequence[int], spaces: bool = False) -> str:
        known = [int(i) for i in ids if i < self.vocab_size]
        text = "".join(self._decode_parts(known)) if self._added else self._processor.decode(known)
        return text if spaces else text.strip(" ")

    def piece(self, token: int) -> str:
        token = int(token)
        if token >= self.vocab_size:
            return f"[{token}]"
        return self._added[token] if token in self._added else self._processor.id_to_piece(token).replace(SPACE, " ")

    def _token_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        piece_id = self._processor.piece_to_id(token)
        is_unknown = piece_id == self._processor.unk_id() and token != self._processor.id_to_piece(piece_id)
        return None if is_unknown else piece_id

    def _encode_segment(self, text: str) -> list[int]:
        if text.startswith("\n"):
            ids = self.encode(text)
            # SentencePiece adds a space before every text. Before a line break it is a separate piece: drop it, unless the
            # model reads line breaks as spaces.
            spaced = bool(ids) and ids[0] not in self._added and self._processor.id_to_piece(ids[0]) == SPACE
            return ids[1:] if spaced and self.encode("\n") else ids
        return self.encode(text.removeprefix(" "))

    def _encode_parts(self, text: str, tokens: re.Pattern[str] | None, continues: bool) -> Encoded:
        """Encodes text in which `tokens` are matched. The parts between the tokens are encoded separately: the first as the
        beginning of a text unless `continues`, the others as the beginning of a text only in a legacy tokenizer."""
        ids, spans, at = [], [], 0
        matches = [] if tokens is None else list(tokens.finditer(text))
        for match in (*matches, None):
            end = len(text) if match is None else match.start()
            if end > at:
                inside = continues if at == 0 else not self.files.legacy
                processor = self._inside if inside else self._processor
                encoding = processor.encode(text[at:end], return_type="offset_mapping")
                ids += encoding["ids"]
                spans += [(at + start, at + stop) for start, stop in encoding["offsets"]]
            if match is not None:
                ids.append(self._special[match[0]] if match[0] in self._special else self._added_ids[match[0]])
                spans.append(match.span())
                at = match.end()
        return Encoded(ids, spans)

    def _decode_parts(self, ids: Iterable[int]) -> Iterator[str]:
        """The texts of the runs between added tokens, with leading spaces, and of added tokens that are not special."""
        run: list[int] = []
        for token in (*ids, None):
            if token is not None and token not in self._added:
                run.append(token)
                continue
            words = [i for i in run if i not in self.special_ids]
            if words and self._processor.id_to_piece(words[0]).startswith(SPACE):
                yield " "
            yield self._processor.decode(words)
            run = []
            if token is not None and token not in self.special_ids:
                yield self._added[token]

    @functools.cached_property
    def _inside(self) -> sentencepiece.SentencePieceProcessor:
        """The same model for text that follows other text: it adds and removes no spaces."""
        return sentencepiece.SentencePieceProcessor(model_proto=self._model + _KEEP_SPACES)


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of the tokens, preferring longer ones; None if there are no tokens."""
    ordered = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


PRINTABLE = "".join(chr(code) for code in range(33, 127))
"""The visible ASCII characters."""


def least_vocabulary(alphabet: str) -> int:
    """The number of ids for markers, the four special tokens, the space and the characters of the alphabet."""
    return len(MARKERS) + 4 + 1 + len(set(alphabet))


def train_tokenizer(texts: Iterable[str], vocab_size: int | None, path: str | Path, alphabet: str = PRINTABLE) -> Tokenizer:
    """Trains the project's own tokenizer (BPE, markers as single symbols) and writes it to `path` atomically.

    The same texts and size give the same file: training uses one thread and no sampling. The alphabet is always covered (by
    default printable ASCII, so that any English text can be encoded). Characters outside the alphabet and the texts become the
    unknown token.

    Args:
        texts: lines of plain text, without markers.
        vocab_size: the number of ids, including markers; None: only markers, special tokens and single characters.
        path: the `.model` file.
        alphabet: characters that are covered even if the texts do not contain them.

    Raises:
        UserError: the texts are too few or too uniform for the vocabulary size.
    """
    path = Path(path)
    model = io.BytesIO()
    vocab_size = least_vocabulary(alphabet) if vocab_size is None else vocab_size
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
        raise UserError(f"cannot train a tokenizer of {vocab_size} symbols on these texts: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + f".{os.getpid()}.tmp")
    temporary.write_bytes(model.getvalue())
    os.replace(temporary, path)
    return SentencePieceTokenizer.load(path, TokenizerFiles(str(path.parent)))
