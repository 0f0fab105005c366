"""Dialogues as a model's own chat template writes them: ids, and which of them the assistant says.

Ids are those of `transformers` (`apply_chat_template(..., tokenize=True)`) for ordinary text: the template alone decides
whether a bos stands first, and special tokens that it spells out are tokens. What a message says is never a special token:
where one is spelled out in a message it is cut after its first character, so that its pieces are text. To find its place in the
rendering the cut is marked by a character that no text holds; without the marks the rendering must be that of the real message.

An answer's end is the first special token after it, with nothing but white space between. White space after the end is the
template's and is not learnt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxalign.data.chat import template as chat_template
from jaxalign.data.chat.template import CLOSE, CUT, END, MARKS, OPEN, DialogueRefused
from jaxalign.data.tokenizers.base import Encoded, Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message

_MARK = re.compile("|".join(MARKS))
_PROBE = Message("user", "Hello.")


def render(tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool = False) -> str:
    """The dialogue as text; with `begin_answer` up to where the assistant's next answer begins.

    Raises:
        UserError: there is no template, or it fails (`chat_template.render`).
    """
    return _places(_write(tokenizer, messages, begin_answer)).text


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids of a dialogue up to where the assistant's answer begins. Raises UserError where the last turn is its own."""
    if not messages or messages[-1].role == "assistant":
        raise UserError("a prompt must end with a message to the assistant; this one is empty or ends with its own")
    return _encode(tokenizer, _rendered(tokenizer, messages, begin_answer=True)).ids


def encode_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of an answer as they stand after a prompt, with what the template writes before it, and with its end.

    Raises:
        UserError: the template puts no end after an answer, or an answered dialogue does not go on from its prompt: there the
            answer has no place after it.
    """
    answered = _answered(tokenizer, text)
    prompt = _rendered(tokenizer, [_PROBE], begin_answer=True)
    if not answered.rendered.text.startswith(prompt.text):
        raise UserError(f"the chat template of {tokenizer.files.folder} writes an answered dialogue otherwise than as its "
                        f"prompt and the answer (the prompt ends with {prompt.text[-30:]!r}), so that answers cannot be "
                        "learnt with it; give another chat_template")
    ids, before = answered.encoded.ids, _encode(tokenizer, prompt).ids
    if ids[: len(before)] == before:
        return ids[len(before) : answered.end + 1]
    # A token reaches over the seam (a line break of both, say). Sampling begins after the prompt's own tokens, so does this.
    places = answered.rendered._replace(cuts=tuple(sorted({*answered.rendered.cuts, len(prompt.text)})))
    found = _encode(tokenizer, places)
    first = next(i for i, (start, _) in enumerate(found.spans) if start >= len(prompt.text))
    last = _end(tokenizer, found, places, places.ends[0])
    return found.ids[first : None if last is None else last + 1]


def encode_dialogue(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """(ids, which of them the assistant says) of a whole dialogue.

    Where the template has `{% generation %}` blocks, they say it. Else each answer reaches from the end of the rendering of
    what stands before it to its end. A token that is partly the assistant's counts as its own. Each turn is taken as it
    stands in the whole dialogue (some templates take the reasoning out of all answers but the last).

    Raises:
        UserError: the template fails; or it has no such blocks and a dialogue does not go on from its own beginning, so that it
            cannot be told what the assistant says.
    """
    source = _source(tokenizer)
    if "endgeneration" in source:
        places = _rendered(tokenizer, messages)
        encoded = _encode(tokenizer, places)
        return encoded.ids, _mask(encoded, places.blocks)
    places = _rendered(tokenizer, messages, ends=True)
    encoded = _encode(tokenizer, places)
    numbers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    answers = []
    for number, after in zip(numbers, places.ends, strict=True):
        before = render(tokenizer, messages[:number], begin_answer=True)
        if not places.text.startswith(before) or after < len(before):
            raise UserError(f"the chat template of {tokenizer.files.folder} writes the beginning of a dialogue otherwise once "
                            f"it goes on (message {number + 1} of {len(messages)}), so that it cannot be told what the "
                            "assistant says; put {% generation %} blocks into it")
        end = _end(tokenizer, encoded, places, after)
        answers.append((len(before), after if end is None else encoded.spans[end][1]))
    return encoded.ids, _mask(encoded, answers)


def encode_whole(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids of a whole dialogue, to its last character as the template writes it. Raises UserError where it fails."""
    return _encode(tokenizer, _rendered(tokenizer, messages)).ids


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the template's end of a turn, and the tokenizer's own."""
    answered = _answered(tokenizer, "Hello.")
    return tuple(dict.fromkeys((answered.encoded.ids[answered.end], *tokenizer.stop_ids)))


class _Places(NamedTuple):
    """A rendering without its marks, and where they stood: cuts, ends of answers, and blocks (start, end)."""

    text: str
    cuts: tuple[int, ...]
    ends: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]


class _Answered(NamedTuple):
    rendered: _Places
    encoded: Encoded
    end: int


def _source(tokenizer: Tokenizer) -> str:
    if tokenizer.files.chat_template is None:
        raise UserError(f"{tokenizer.files.folder} has no chat template; put chat_template.jinja there, or set "
                        "config.data.style to 'hh'")
    return tokenizer.files.chat_template


def _write(tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool) -> str:
    files = tokenizer.files
    variables = tokenizer.names | ({"additional_special_tokens": list(files.other_special)} if files.other_special else {})
    return chat_template.render(_source(tokenizer), files.folder, messages, variables, begin_answer)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool = False, ends: bool = False) -> _Places:
    """The rendering with its cuts, and with the ends of the assistant's messages where they are asked for.

    Raises:
        DialogueRefused: a mark stands in a message, or the template writes what is marked otherwise.
    """
    for message in messages:
        if any(mark in message.content for mark in MARKS):
            raise DialogueRefused("a message holds a character from U+FDD0 to U+FDD3, which Unicode keeps out of texts; "
                                  "take it out")
    plain = _places(_write(tokenizer, messages, begin_answer))
    cut = [_with_cuts(tokenizer, message) for message in messages]
    if cut == list(messages) and not ends:
        return plain
    # Most templates trim what is said, and a mark at its end would keep them from it.
    for tail in (str, str.rstrip, lambda text: text.rstrip("\n")) if ends else (str,):
        said = [_ended(message, tail) if ends and message.role == "assistant" else message for message in cut]
        places = _places(_write(tokenizer, said, begin_answer))
        if places.text == plain.text and len(places.ends) == sum(message.content.endswith(END) for message in said):
            return places
    change = "special tokens in it are cut" if cut != list(messages) else "the ends of answers are marked"
    raise DialogueRefused(f"the chat template of {tokenizer.files.folder} looks into what is said, and writes a dialogue "
                          f"otherwise once {change}; take special tokens out of the messages, or give another chat_template")


def _ended(message: Message, tail: Callable[[str], str]) -> Message:
    return Message(message.role, tail(message.content) + END)


def _with_cuts(tokenizer: Tokenizer, message: Message) -> Message:
    cuts = tokenizer.cuts(message.content)
    edges = [0, *cuts, len(message.content)]
    parts = [message.content[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return Message(message.role, CUT.join(parts)) if cuts else message


def _places(marked: str) -> _Places:
    """Takes the marks out."""
    found: dict[str, list[int]] = {mark: [] for mark in MARKS}
    for taken, match in enumerate(_MARK.finditer(marked)):
        found[match[0]].append(match.start() - taken)
    blocks = tuple(zip(found[OPEN], found[CLOSE], strict=True))
    return _Places(_MARK.sub("", marked), tuple(found[CUT]), tuple(found[END]), blocks)


def _encode(tokenizer: Tokenizer, places: _Places) -> Encoded:
    """The rendering's ids, piece by piece where it is cut."""
    ids, spans = [], []
    edges = [0, *places.cuts, len(places.text)]
    for start, stop in zip(edges, edges[1:], strict=False):
        piece = tokenizer.encode_template(places.text[start:stop], continues=start > 0)
        ids += piece.ids
        spans += [(start + a, start + b) for a, b in piece.spans]
    return Encoded(ids, spans)


def _answered(tokenizer: Tokenizer, text: str) -> _Answered:
    """A question and this answer to it, as the template writes them, and the token that ends it."""
    places = _rendered(tokenizer, [_PROBE, Message("assistant", text)], ends=True)
    encoded = _encode(tokenizer, places)
    end = _end(tokenizer, encoded, places, places.ends[0])
    if end is None:
        raise UserError(f"the chat template of {tokenizer.files.folder} puts no special token after an answer (it goes on with "
                        f"{places.text[places.ends[0]:][:30]!r}), so that its end can be neither learnt nor seen; give another "
                        "chat_template, or name the token that ends an answer among the tokenizer's special tokens")
    return _Answered(places, encoded, end)


def _end(tokenizer: Tokenizer, encoded: Encoded, places: _Places, after: int) -> int | None:
    """The first special token behind the character `after`, if there is but white space before it."""
    for index, (token, (start, stop)) in enumerate(zip(encoded.ids, encoded.spans, strict=True)):
        if token in tokenizer.special_ids and stop > after:
            return None if places.text[after:start].strip() else index
    return None


def _mask(encoded: Encoded, parts: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens stand for a character of one of the parts. A token that stands for none (a byte of several, say) is where
    it begins."""
    return [any(a < max(stop, start + 1) and start < b for a, b in parts) for start, stop in encoded.spans]
