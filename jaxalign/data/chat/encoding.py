"""Encodes dialogues with a model's own chat template, and finds the tokens that belong to the assistant.

For ordinary text the ids equal those of `transformers` (`apply_chat_template(..., tokenize=True)`): the template alone decides
whether bos comes first, and special tokens that it spells out become tokens. The text of a message never becomes a special
token: a special token spelled out in a message is split after its first character, so that its pieces are plain text. A mark
character, which no text contains, locates such a cut in the rendering. Without the marks, the rendering must equal that of the
original message.

An answer ends with the first special token after it, with only whitespace in between. Whitespace after that token belongs to
the template and is not trained on.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign.data.chat import template as chat_template
from jaxalign.data.chat.dialogues import Dialogue
from jaxalign.data.chat.template import CLOSE, CUT, END, MARKS, OPEN, DialogueRefused
from jaxalign.data.tokenizers.base import Encoded, Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message

_MARK = re.compile("|".join(MARKS))
_PROBE = Message("user", "Hello.")
_SHORT = "Hello."


def render(tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool = False) -> str:
    """The dialogue as text; with `begin_answer`, up to the beginning of the assistant's next answer.

    Raises:
        UserError: there is no template, or it fails (`chat_template.render`).
    """
    return _places(_write(tokenizer, messages, begin_answer)).text


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
    """The ids of a dialogue up to the assistant's answer.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: the dialogue.
        variables: further variables of the template; they take precedence over `tokenizer.files.variables`.

    Raises:
        UserError: the last turn is the assistant's, or the template fails.
    """
    if not messages or messages[-1].role == "assistant":
        raise UserError("a prompt must end with a message to the assistant; this one is empty or ends with an answer")
    return _encode(tokenizer, _rendered(tokenizer, messages, begin_answer=True, more=variables)).ids


def encode_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of an answer after a prompt, including the text that the template writes before it, and its end token.

    Raises:
        UserError: the template writes no end after an answer, or the rendering of an answered dialogue does not begin with
            the rendering of its prompt.
    """
    answered = _answered(tokenizer, text)
    prompt = _rendered(tokenizer, [_PROBE], begin_answer=True)
    if not answered.rendered.text.startswith(prompt.text):
        answered = _inserted(tokenizer, prompt.text, text)
    ids, before = answered.encoded.ids, _encode(tokenizer, prompt).ids
    if ids[: len(before)] == before:
        return ids[len(before) : answered.end + 1]
    # A token spans the boundary, for example one that merges line breaks of both parts. As in sampling, the answer begins after
    # the prompt's own tokens.
    places = answered.rendered._replace(cuts=tuple(sorted({*answered.rendered.cuts, len(prompt.text)})))
    encoded = _encode(tokenizer, places)
    first = next(i for i, (start, _) in enumerate(encoded.spans) if start >= len(prompt.text))
    last = _end(tokenizer, encoded, places, places.ends[0])
    return encoded.ids[first : None if last is None else last + 1]


def encode_dialogue(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """(ids, mask) of a whole dialogue; the mask is True for the assistant's tokens.

    The template's `{% generation %}` blocks define the mask. Without such blocks, an answer extends from the end of the
    rendering of the messages before it to its own end. A token that is partly the assistant's counts as the assistant's. One
    that covers no whole character, such as one byte of a character, counts at its start. Each turn is read from the rendering
    of the whole dialogue, because some templates remove the reasoning from all answers except the last.

    Raises:
        UserError: the template fails; or it has no such blocks and renders the beginning of a dialogue differently when
            messages follow, so that the assistant's text cannot be located.
    """
    has_blocks = "endgeneration" in (tokenizer.files.chat_template or "")
    places = _rendered(tokenizer, messages, ends=not has_blocks)
    encoded = _encode(tokenizer, places)
    parts = list(places.blocks)
    numbers = [] if has_blocks else [i for i, message in enumerate(messages) if message.role == "assistant"]
    for number, after in zip(numbers, places.ends, strict=True):
        before = render(tokenizer, messages[:number], begin_answer=True)
        if not places.text.startswith(before) or after < len(before):
            raise UserError(f"the chat template of {tokenizer.files.folder} writes the beginning of a dialogue differently "
                            f"when messages follow (message {number + 1} of {len(messages)}), so the assistant's text cannot "
                            "be located; add {% generation %} blocks to it")
        end = _end(tokenizer, encoded, places, after)
        parts.append((len(before), after if end is None else encoded.spans[end][1]))
    mask = [any(a < max(stop, start + 1) and start < b for a, b in parts) for start, stop in encoded.spans]
    return encoded.ids, mask


def encode_whole(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The ids of a whole dialogue, up to the last character of its rendering. Raises UserError if the template fails."""
    return _encode(tokenizer, _rendered(tokenizer, messages)).ids


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the template's end of a turn, then the tokenizer's stop ids."""
    answered = _answered(tokenizer, _SHORT)
    return tuple(dict.fromkeys((answered.encoded.ids[answered.end], *tokenizer.stop_ids)))


class _Places(NamedTuple):
    """A rendering without marks, and the positions of the marks: cuts, ends of answers, and blocks (start, end)."""

    text: str
    cuts: tuple[int, ...]
    ends: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]


class _Answered(NamedTuple):
    rendered: _Places
    encoded: Encoded
    end: int


def _write(
    tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool, more: Mapping[str, Any] | None = None
) -> str:
    files = tokenizer.files
    if files.chat_template is None:
        raise UserError(f"{files.folder} has no chat template; put chat_template.jinja there, or set config.data.style to 'hh'")
    variables = tokenizer.names | ({"additional_special_tokens": list(files.other_special)} if files.other_special else {})
    variables |= files.variables | (more or {})
    return _text(files.chat_template, files.folder, tuple(messages), json.dumps(variables), begin_answer)


@functools.lru_cache(maxsize=32)
def _text(template: str, folder: str, messages: Dialogue, variables: str, begin_answer: bool) -> str:
    """A rendering (`chat_template.render`). A row is counted and then encoded, which asks for the same ones several times.

    variables: JSON.
    """
    return chat_template.render(template, folder, messages, json.loads(variables), begin_answer)


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], begin_answer: bool = False, ends: bool = False,
    more: Mapping[str, Any] | None = None,
) -> _Places:
    """The rendering with its cuts and, with `ends`, the ends of the assistant's messages.

    Raises:
        DialogueRefused: a message contains a mark, or the template writes a marked message differently or leaves the system
            message out.
    """
    for message in messages:
        if any(mark in message.content for mark in MARKS):
            raise DialogueRefused("a message has a character from U+FDD0 to U+FDD3, which Unicode reserves; "
                                  "remove it")
    plain = _places(_write(tokenizer, messages, begin_answer, more))
    system = messages[0].content.strip() if len(messages) > 1 and messages[0].role == "system" else ""
    # It is present only if it occurs more often than in the other messages, which may contain it too.
    elsewhere = sum(message.content.count(system) for message in messages[1:])
    may_lack_system = bool(system) and plain.text.count(system) <= elsewhere
    if may_lack_system and plain == _places(_write(tokenizer, messages[1:], begin_answer, more)):
        raise DialogueRefused(f"the chat template of {tokenizer.files.folder} leaves the system message out; remove the "
                              "message, or provide another chat_template")
    cut = []
    for message in messages:
        edges = [0, *tokenizer.cuts(message.content), len(message.content)]
        pieces = [message.content[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        cut.append(Message(message.role, CUT.join(pieces)))
    if cut == list(messages) and not ends:
        return plain
    # Most templates trim messages. A mark at the end would prevent that, so try trimming the message first.
    for tail in (str, str.rstrip, lambda text: text.rstrip("\n")) if ends else (str,):
        marked = [
            Message(message.role, tail(message.content) + END) if ends and message.role == "assistant" else message
            for message in cut
        ]
        places = _places(_write(tokenizer, marked, begin_answer, more))
        if places.text == plain.text and len(places.ends) == sum(message.content.endswith(END) for message in marked):
            return places
    change = "special tokens in it are cut" if cut != list(messages) else "the ends of answers are marked"
    raise DialogueRefused(f"the chat template of {tokenizer.files.folder} depends on the text of messages: it writes a "
                          f"dialogue differently when {change}; remove special tokens from the messages, or provide another "
                          "chat_template")


def _places(marked: str) -> _Places:
    """Removes the marks."""
    positions: dict[str, list[int]] = {mark: [] for mark in MARKS}
    for removed, match in enumerate(_MARK.finditer(marked)):
        positions[match[0]].append(match.start() - removed)
    blocks = tuple(zip(positions[OPEN], positions[CLOSE], strict=True))
    return _Places(_MARK.sub("", marked), tuple(positions[CUT]), tuple(positions[END]), blocks)


def _encode(tokenizer: Tokenizer, places: _Places) -> Encoded:
    """The ids of a rendering, with the text between cuts encoded separately."""
    ids, spans = [], []
    edges = [0, *places.cuts, len(places.text)]
    for start, stop in zip(edges, edges[1:], strict=False):
        piece = tokenizer.encode_template(places.text[start:stop], continues=start > 0)
        ids += piece.ids
        spans += [(start + a, start + b) for a, b in piece.spans]
    return Encoded(ids, spans)


def _answered(tokenizer: Tokenizer, text: str) -> _Answered:
    """The rendering of a question with this answer, and the index of the token that ends the answer."""
    places = _rendered(tokenizer, [_PROBE, Message("assistant", text)], ends=True)
    encoded = _encode(tokenizer, places)
    end = _end(tokenizer, encoded, places, places.ends[0])
    if end is None:
        raise UserError(f"the chat template of {tokenizer.files.folder} puts no special token after an answer (it continues "
                        f"with {places.text[places.ends[0]:][:30]!r}), so the end cannot be trained or detected; provide "
                        "another chat_template, or add the token that ends an answer to the tokenizer's special tokens")
    return _Answered(places, encoded, end)


def _inserted(tokenizer: Tokenizer, prompt: str, text: str) -> _Answered:
    """`_answered` for a text that the template writes in another form after the prompt.

    With thinking off, the prompts of some templates end with an empty thought, but an answer that contains "</think>" is
    written with its own thought. The text then takes the place of the answer "Hello.", as in sampling, where it followed the
    prompt.

    Raises:
        UserError: the template does not write that answer after the prompt either.
    """
    places, start = _answered(tokenizer, _SHORT).rendered, len(prompt)
    if not places.text.startswith(prompt + _SHORT):
        raise UserError(f"the chat template of {tokenizer.files.folder} does not write an answered dialogue as its "
                        f"prompt and the answer (the prompt ends with {prompt[-30:]!r}), so it cannot train "
                        "answers; provide another chat_template")
    places = places._replace(
        text=prompt + text + places.text[start + len(_SHORT) :], cuts=tuple(start + cut for cut in tokenizer.cuts(text)),
        ends=(start + len(text),),
    )
    encoded = _encode(tokenizer, places)
    return _Answered(places, encoded, _end(tokenizer, encoded, places, places.ends[0]))


def _end(tokenizer: Tokenizer, encoded: Encoded, places: _Places, after: int) -> int | None:
    """The index of the first special token after the character `after`, if only whitespace precedes it."""
    for index, (token, (start, stop)) in enumerate(zip(encoded.ids, encoded.spans, strict=True)):
        if token in tokenizer.special_ids and stop > after:
            return None if places.text[after:start].strip() else index
    return None
