"""The text formats of dialogues, critiques, revisions and comparisons.

Every renderer returns *segments*: strings that the tokenizer encodes separately and concatenates. A segment that equals `END`
or one of `MARKERS` becomes one token. The same characters inside a longer segment stay plain text, so a turn cannot contain a
marker. Training documents and sampling prompts are built from the same segments and therefore have the same token boundaries.

Text that a model writes (answer, critique, revision, reasoning) is followed by `END`, the tokenizer's eos. Sampling therefore
always stops at eos.

Plain dialogues have two styles: "compact", with the project's own markers, and "hh", the public transcript format
"\\n\\nHuman: ...\\n\\nAssistant: ..." for tokenizers without markers. A system message is the text before the first turn of a
transcript; the compact style has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.data.chat.template import DialogueRefused
from jaxalign.errors import UserError
from jaxalign.records import Message, Principle

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
"""The two verdicts of a comparison: the first or the second answer shown is better. One token each."""

MARKERS = (
    USER,
    ASSISTANT,
    CRITIQUE_REQUEST,
    CRITIQUE,
    REVISION_REQUEST,
    REVISION,
    FIRST,
    SECOND,
    QUESTION,
    REASONING,
    VERDICT,
    *OPTIONS,
)
"""Every special segment except `END`; each is one symbol of the project's tokenizer."""

MODEL_SPEAKS = (ASSISTANT, CRITIQUE, REVISION, REASONING, VERDICT)
"""Markers after which the model writes: up to and including the next `END`, or up to the next marker except `OPTIONS`."""

Segments = list[str]

_HH_ROLES = {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"}
_COMPACT_ROLES = {"user": USER, "assistant": ASSISTANT}


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
    return _turns(messages, style) + [_roles(style)["assistant"]]


def render_dialogue(messages: Sequence[Message], style: str = "compact") -> Segments:
    """A whole dialogue that ends with the assistant's answer; the caller adds the final eos."""
    _check(messages, style)
    segments = _turns(messages, style)
    return segments[:-1] if segments[-1] == END else segments


def render_response(text: str, style: str = "compact") -> Segments:
    """The segments of an answer after `render_prompt`, without eos. An empty answer has no segments."""
    return _text(text, style)


def render_critique(messages: Sequence[Message], response: str, principle: Principle) -> Segments:
    """Prompt, response and the principle's critique request, up to the beginning of the critique."""
    answered = render_prompt(messages) + _text(response) + [END]
    return answered + [CRITIQUE_REQUEST, principle.critique_request, CRITIQUE]


def render_revision(messages: Sequence[Message], response: str, principle: Principle, critique: str) -> Segments:
    """The critiqued response and the revision request, up to the beginning of the revision."""
    criticised = render_critique(messages, response, principle) + _text(critique) + [END]
    return criticised + [REVISION_REQUEST, principle.revision_request, REVISION]


def render_comparison(
    messages: Sequence[Message], first: str, second: str, principle: Principle, reasoning: bool = True
) -> Segments:
    """Two answers to one dialogue and the principle's question, up to the beginning of the judge's text.

    The text also names each answer ("First: ..."), so that the judge can refer to it. With `reasoning`, the judge writes its
    reasoning first (sample until eos, then use `render_verdict`). Otherwise the next token is one of `OPTIONS`.
    """
    _check(messages, "compact")
    shown = _turns(messages, "compact") + [FIRST, f"First: {first}".strip(), SECOND, f"Second: {second}".strip()]
    return shown + [QUESTION, principle.comparison, REASONING if reasoning else VERDICT]


def render_verdict(
    messages: Sequence[Message], first: str, second: str, principle: Principle, reasoning: str
) -> Segments:
    """The comparison with the judge's reasoning; the next token is one of `OPTIONS`."""
    return render_comparison(messages, first, second, principle) + _text(reasoning) + [END, VERDICT]


def render_rating(messages: Sequence[Message], response: str, principle: Principle, reasoning: bool = True) -> Segments:
    """An answered prompt and the request to rate the answer from 1 to 10 under the principle, up to the judge's text.

    With `reasoning`, the judge writes its reasoning first (sample until eos, then use `render_rating_verdict`). Otherwise one
    of `RATINGS` and an eos follow.
    """
    _check(messages, "compact")
    answered = render_prompt(messages) + _text(response) + [END]
    request = f"{principle.critique_request} Rate it from 1 to 10."
    return answered + [QUESTION, request, REASONING if reasoning else VERDICT]


def render_rating_verdict(messages: Sequence[Message], response: str, principle: Principle, reasoning: str) -> Segments:
    """The rating request with the judge's reasoning; one of `RATINGS` follows."""
    return render_rating(messages, response, principle) + _text(reasoning) + [END, VERDICT]


def written_by_model(segments: Sequence[str]) -> list[bool]:
    """For each segment of a document, whether the model writes it. In a text without markers it writes all segments.

    The `END` after the model's text counts as written by the model. Requests, principles, answers shown for comparison and
    markers do not.
    """
    if not any(segment in MARKERS for segment in segments):
        return [True] * len(segments)
    written, speaking = [], False
    for segment in segments:
        if segment in MARKERS and segment not in OPTIONS:
            written.append(False)
            speaking = segment in MODEL_SPEAKS
        else:
            written.append(speaking)
            speaking = speaking and segment != END
    return written


def _roles(style: str) -> dict[str, str]:
    return _HH_ROLES if style == "hh" else _COMPACT_ROLES


def _text(text: str, style: str = "compact") -> Segments:
    if not text:
        return []
    return [" " + text] if style == "hh" else [text]


def _turns(messages: Sequence[Message], style: str) -> Segments:
    segments: Segments = []
    system = ""  # Part of the next segment, since a segment of its own could equal a marker.
    for message in messages:
        if message.role == "system":
            system = message.content
            continue
        segments += [system + _roles(style)[message.role], *_text(message.content, style)]
        system = ""
        if message.role == "assistant" and style == "compact":
            segments.append(END)
    return segments


def _check(messages: Sequence[Message], style: str) -> None:
    if style not in ("compact", "hh"):
        raise UserError(f"{style!r} is not a prompt style; use 'compact' or 'hh'")
    if not messages:
        raise UserError("a dialogue has no messages; at least one message from the user is needed")
    for index, message in enumerate(messages):
        if message.role == "system" and style == "compact":
            raise DialogueRefused("the dialogue has a system message, which the style 'compact' cannot write")
        if message.role not in _COMPACT_ROLES and not (message.role == "system" and index == 0):
            raise UserError(f"{message.role!r} is not a role of message {index + 1}; use 'user' or 'assistant', or 'system' "
                            "for the first message")
