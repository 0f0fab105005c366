"""The text formats of dialogues and of requests to a judge, as segments.

*Segments* are strings that the tokenizer encodes separately and concatenates. A segment that equals `END` or one of `MARKERS`
becomes one token. A text that spells a marker stays plain text. Training documents and sampling prompts are built from the same
segments and therefore have the same token boundaries.

Text that a model writes (answer, critique, revision, reasoning) is followed by `END`, the tokenizer's eos. Sampling therefore
always stops at eos.

There are two styles: "compact", with the project's own markers, and "hh", the public transcript format
"\\n\\nHuman: ...\\n\\nAssistant: ..." for tokenizers without markers. A system message is the text before the first turn of a
transcript; the compact style has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.data.chat.template import DialogueRefused
from jaxalign.errors import UserError
from jaxalign.records import Message

END = "<end>"
"""Represents the tokenizer's eos; the string itself is in no vocabulary."""

USER = "<user>"
ASSISTANT = "<assistant>"
CRITIQUE_REQUEST = "<critique_request>"
CRITIQUE = "<critique>"
REVISION_REQUEST = "<revision_request>"
REVISION = "<revision>"
FIRST = "<first>"
SECOND = "<second>"
QUESTION = "<question>"
REASONING = "<reasoning>"
VERDICT = "<verdict>"
RATINGS = tuple(str(rating) for rating in range(1, 11))
"""The possible ratings: plain text of one or more tokens each."""
OPTIONS = ("(A)", "(B)")
"""Two verdicts of a comparison: the first or the second answer shown is better. One token each."""
TIE = "(C)"
"""The third verdict of a comparison: neither answer is better. One token."""
_VERDICTS = (*OPTIONS, TIE)

MARKERS = (
    USER, ASSISTANT, CRITIQUE_REQUEST, CRITIQUE, REVISION_REQUEST, REVISION, FIRST, SECOND, QUESTION, REASONING, VERDICT,
    *_VERDICTS,
)
"""Every special segment except `END`; each is one symbol of the project's tokenizer."""

MODEL_SPEAKS = (ASSISTANT, CRITIQUE, REVISION, REASONING, VERDICT)
"""Markers after which the model writes: up to and including the next `END`, or up to the next marker except a verdict."""

Segments = list[str]

_SPEAKERS = {"user": "Human", "assistant": "Assistant"}


def render_prompt(messages: Sequence[Message], style: str = "compact") -> Segments:
    """The dialogue up to the beginning of the assistant's next answer.

    Args:
        messages: the turns so far, ending with a user's turn.
        style: "compact" or "hh".

    Raises:
        DialogueRefused: the dialogue has a system message, and the style is "compact".
        UserError: the style or a role is unknown, the dialogue is empty, or the last turn is not the user's.
    """
    _check(messages, style)
    if messages[-1].role != "user":
        raise UserError(f"the last message of a prompt is from {messages[-1].role!r}; it must be from 'user'")
    return _turns(messages, style) + [_label("assistant", style)]


def render_dialogue(messages: Sequence[Message]) -> Segments:
    """A whole dialogue in the style "compact" that ends with the assistant's answer; the caller adds the final eos."""
    _check(messages, "compact")
    segments = _turns(messages, "compact")
    return segments[:-1] if segments[-1] == END else segments


def render_response(text: str, style: str = "compact") -> Segments:
    """The segments of an answer after `render_prompt`, without eos. An empty answer has no segments."""
    if not text:
        return []
    if style == "hh":
        return [" " + text]
    # Two segments keep a text that spells a marker plain.
    return [text[:1], text[1:]] if text in MARKERS or text == END else [text]


def render_request(messages: Sequence[Message], role: str, begin: str, style: str) -> Segments:
    """A request to a judge, up to the judge's text.

    Args:
        messages: its messages. Their roles may be any marker's name in the style "compact", and any speaker's name in the
            style "hh", where a message with the role "" is text without a speaker.
        role: the role under which the judge answers.
        begin: the text with which the answer begins.
        style: "compact" or "hh".

    Raises:
        DialogueRefused: a message is a system message, and the style is "compact".
        UserError: a role has no marker, and the style is "compact".
    """
    if style == "compact":
        roles = [*(message.role for message in messages), role]
        if "system" in roles:
            raise DialogueRefused("the dialogue has a system message, which the style 'compact' cannot write")
        unknown = next((name for name in roles if f"<{name}>" not in MARKERS), None)
        if unknown is not None:
            raise UserError(f"a request has a message with the role {unknown!r}, which has no marker; the roles are "
                            f"{', '.join(marker.strip('<>') for marker in MARKERS if marker not in _VERDICTS)}")
    return [*_turns(messages, style), _label(role, style), *render_response(begin, style)]


def written_by_model(segments: Sequence[str]) -> list[bool]:
    """For each segment of a document, whether the model writes it. In a text without markers it writes all segments.

    The `END` after the model's text counts as written by the model. Requests, principles, answers shown for comparison and
    markers do not.
    """
    if not any(segment in MARKERS for segment in segments):
        return [True] * len(segments)
    written, speaking = [], False
    for segment in segments:
        if segment in MARKERS and segment not in _VERDICTS:
            written.append(False)
            speaking = segment in MODEL_SPEAKS
        else:
            written.append(speaking)
            speaking = speaking and segment != END
    return written


def _label(role: str, style: str) -> str:
    """The segment that precedes a message with this role."""
    return f"\n\n{_SPEAKERS.get(role, role)}:" if style == "hh" else f"<{role}>"


def _turns(messages: Sequence[Message], style: str) -> Segments:
    segments: Segments = []
    prefix = ""  # Part of the next segment, since a segment of its own could equal a marker.
    for message in messages:
        if message.role in ("system", ""):
            prefix += message.content
            continue
        label = _label(message.role, style)
        segments += [prefix + label, *render_response(message.content, style)]
        prefix = ""
        if style == "compact" and label in MODEL_SPEAKS:
            segments.append(END)
    return segments + render_response(prefix)


def _check(messages: Sequence[Message], style: str) -> None:
    if style not in ("compact", "hh"):
        raise UserError(f"{style!r} is not a prompt style; use 'compact' or 'hh'")
    if not messages:
        raise UserError("a dialogue has no messages; at least one message from the user is needed")
    for index, message in enumerate(messages):
        if message.role == "system" and style == "compact":
            raise DialogueRefused("the dialogue has a system message, which the style 'compact' cannot write")
        if message.role not in _SPEAKERS and not (message.role == "system" and index == 0):
            raise UserError(f"{message.role!r} is not a role of message {index + 1}; use 'user' or 'assistant', or 'system' "
                            "for the first message")
