"""Encodes dialogues as token ids, in each style.

- "chat": the model's own chat template.
- "hh": "\\n\\nHuman: ...\\n\\nAssistant: ...".
- "compact": with the markers of a tokenizer trained by jaxalign.
- "plain": a single text, which the answer continues.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.formats import USER, render_prompt, render_response
from jaxalign.data.packing import completion
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Message, Rollout

STYLES = ("plain", "chat", "hh", "compact")


def choose_style(tokenizer: Tokenizer, asked: str | None, known: str | None = None) -> str:
    """The style: `asked`, else `known`, else "chat" if the tokenizer has a chat template, else "plain".

    Raises:
      UserError: the style is not one of `STYLES`, or the tokenizer does not support it.
    """
    template = tokenizer.files.chat_template
    style = asked or known or ("plain" if template is None else "chat")
    if style not in STYLES:
        raise UserError(f"style is {style!r}; one of {', '.join(STYLES)} is expected")
    if style == "chat" and template is None:
        raise UserError("the model's folder has no chat template; set the style to plain, hh or compact, or put "
                        "chat_template.jinja there")
    if style == "compact":
        try:
            tokenizer.marker_id(USER)
        except UserError:
            raise UserError(f"the tokenizer has no symbol {USER!r}, which the style compact needs; it is for models trained "
                            "from scratch by jaxalign") from None
    return style


def stop_ids(tokenizer: Tokenizer, style: str) -> tuple[int, ...]:
    """The ids that end an answer in a style."""
    return chat.stop_ids(tokenizer) if style == "chat" else tokenizer.stop_ids


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], style: str) -> list[int]:
    """The ids of a dialogue up to the beginning of the answer, including bos.

    Raises:
      UserError: the style is "plain" and there is more than one message.
    """
    if style == "chat":
        return chat.encode_prompt(tokenizer, messages)
    if style == "plain":
        if len(messages) != 1:
            raise UserError(f"a prompt is a dialogue of {len(messages)} messages, but the style plain continues a single text; "
                            "use the style chat, hh or compact")
        return list(tokenizer.begin_ids) + tokenizer.encode(messages[0].content)
    return list(tokenizer.begin_ids) + tokenizer.encode_segments(render_prompt(messages, style))


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
    ends = rollout.prompt_length + rollout.response_length - rollout.ended
    places = zip(rollout.tokens, rollout.prompt_length, ends, strict=True)
    return [tokenizer.decode(row[start:end]) for row, start, end in places]
