"""Encodes dialogues as token ids, in each style.

- "chat": the model's own chat template.
- "hh": "\\n\\nHuman: ...\\n\\nAssistant: ...".
- "compact": with the markers of a tokenizer trained by jaxalign.
- "plain": a single text, which the answer continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.formats import CRITIQUE_REQUEST, USER, render_prompt, render_response
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.packing import completion
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message, Rollout

STYLES = ("plain", "chat", "hh", "compact")


def choose_style(tokenizer: Tokenizer, asked: str | None, known: str | None = None) -> str:
    """The style: `asked`, else `known`, else "chat" if the tokenizer has a chat template, "compact" if it has jaxalign's
    markers, else "plain".

    Raises:
      UserError: the style is not one of `STYLES`, or the tokenizer does not support it.
    """
    own = "compact" if _has(tokenizer, CRITIQUE_REQUEST) else "plain"  # Other tokenizers may have a symbol "<user>".
    style = asked or known or (own if tokenizer.files.chat_template is None else "chat")
    if style not in STYLES:
        raise UserError(f"style is {style!r}; one of {', '.join(STYLES)} is expected")
    require_style(tokenizer, style, "style")
    return style


def require_style(tokenizer: Tokenizer, style: str, name: str) -> None:
    """Raises UserError if a model's tokenizer does not support a style. name: the field or argument with the style."""
    model = tokenizer.files.folder
    if style == "chat" and tokenizer.files.chat_template is None:
        raise UserError(f"{name} is 'chat', but {model} has no chat template; set it to 'hh', or put chat_template.jinja there")
    if style == "compact" and not _has(tokenizer, USER):
        raise UserError(f"{name} is 'compact', but the tokenizer of {model} has no symbol {USER!r}, which only models trained "
                        "from scratch by jaxalign have; set it to 'chat' if the model has a chat template, else to 'hh'")


def _has(tokenizer: Tokenizer, marker: str) -> bool:
    try:
        tokenizer.marker_id(marker)
    except UserError:
        return False
    return True


def stop_ids(tokenizer: Tokenizer, style: str) -> tuple[int, ...]:
    """The ids that end an answer in a style."""
    return chat.stop_ids(tokenizer) if style == "chat" else tokenizer.stop_ids


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], style: str) -> list[int]:
    """The ids of a dialogue up to the beginning of the answer, including bos.

    Raises:
      DialogueRefused: the style is "plain" and there is more than one message, or the chat template refuses the dialogue.
    """
    if style == "chat":
        return chat.encode_prompt(tokenizer, messages)
    if style == "plain":
        if len(messages) != 1:
            raise DialogueRefused(f"a prompt is a dialogue of {len(messages)} messages, but the style plain continues a single "
                                  "text; use the style chat, hh or compact")
        return list(tokenizer.begin_ids) + tokenizer.encode(messages[0].content)
    return list(tokenizer.begin_ids) + tokenizer.encode_segments(render_prompt(messages, style))


@contextlib.contextmanager
def naming(row: str) -> Iterator[None]:
    """Puts the name of a row in front of the reason why its dialogue is refused."""
    try:
        yield
    except DialogueRefused as error:
        raise DialogueRefused(f"{row}: {error}") from None


def encode_answer(tokenizer: Tokenizer, text: str, style: str) -> list[int]:
    """The ids of an answer with its end token and, in style "chat", with the text that the template writes before it."""
    if style == "chat":
        return chat.encode_answer(tokenizer, text)
    segments = [text] * bool(text) if style == "plain" else render_response(text, style)
    return [*tokenizer.encode_segments(segments), tokenizer.eos_id]


def encode_completion(tokenizer: Tokenizer, messages: Sequence[Message], text: str, style: str):
    """(ids, loss weights) of an answered prompt, with the loss only on the answer."""
    return completion(encode_prompt(tokenizer, messages, style), encode_answer(tokenizer, text, style))


def response_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The text of every response of a rollout (numpy arrays), without its end token."""
    return [text for text, _ in answers_of(tokenizer, rollout, "plain")]


def answers_of(tokenizer: Tokenizer, rollout: Rollout, style: str) -> list[tuple[str, bool]]:
    """(the answer, whether it ended) of every response of a rollout (numpy arrays); see `finish_answer`."""
    ends = rollout.prompt_length + rollout.response_length - rollout.ended
    places = zip(rollout.tokens, rollout.prompt_length, ends, rollout.ended, strict=True)
    return [finish_answer(tokenizer.decode(row[start:end]), bool(ended), style)[:2] for row, start, end, ended in places]


THINKING = ("<think>", "</think>")
"""The delimiters of the thoughts of reasoning models."""


def finish_answer(text: str, ended: bool, style: str) -> tuple[str, bool, str | None]:
    """(the answer, whether it ended, the thoughts before it) in a sampled text.

    In style "hh" an answer ends where the text continues with the next "Human:". In style "chat" the thoughts of a reasoning
    model are not part of the answer; they are None if there are none.
    """
    if style == "hh":
        at = f"\n\n{text}".find("\n\nHuman:")
        return (text, ended, None) if at < 0 else (text[: max(0, at - 2)].strip(), True, None)
    if style == "chat":
        thoughts, answer, ended = split_thoughts(text, THINKING, ended)
        return answer, ended, thoughts
    return text, ended, None


def split_thoughts(text: str, delimiters: tuple[str, str], ended: bool) -> tuple[str | None, str, bool]:
    """(thoughts, the text after them, whether it ended). The thoughts are None if the text has no delimiter.

    The opening delimiter may be missing, because some chat templates write it. A text whose thoughts do not end has no answer.
    """
    opening, closing = delimiters
    before, delimiter, rest = text.partition(closing)
    if delimiter:
        return before.split(opening, 1)[-1].strip(), rest.strip(), ended
    if text.lstrip().startswith(opening):
        return text.lstrip().removeprefix(opening).strip(), "", False
    return None, text, ended
