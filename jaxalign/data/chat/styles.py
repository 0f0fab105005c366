"""Dialogues as token ids, in each style.

- "chat": as the model's own chat template writes them.
- "hh": "\\n\\nHuman: ...\\n\\nAssistant: ...".
- "compact": with the markers of a tokenizer that was trained here.
- "plain": one text, which the answer continues.
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
    """The style `asked` for, else the `known` one, else "chat" where the tokenizer has a chat template, else "plain".

    Raises:
      UserError: it is not one of `STYLES`, or the tokenizer cannot write it.
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
            raise UserError(f"the tokenizer has no symbol {USER!r}, which the style compact needs; it is for models that were "
                            "trained from scratch here") from None
    return style


def stop_ids(tokenizer: Tokenizer, style: str) -> tuple[int, ...]:
    """The ids that end an answer in that style."""
    return chat.stop_ids(tokenizer) if style == "chat" else tokenizer.stop_ids


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], style: str) -> list[int]:
    """The ids of a dialogue up to where the answer begins, bos included.

    Raises:
      UserError: the style is "plain" and there is more than one message.
    """
    if style == "chat":
        return chat.encode_prompt(tokenizer, messages)
    if style == "plain":
        if len(messages) != 1:
            raise UserError(f"a prompt is a dialogue of {len(messages)} messages, but the style plain continues one text; use "
                            "the style chat, hh or compact")
        return list(tokenizer.begin_ids) + tokenizer.encode(messages[0].content)
    return list(tokenizer.begin_ids) + tokenizer.encode_segments(render_prompt(messages, style))


def encode_answer(tokenizer: Tokenizer, text: str, style: str) -> list[int]:
    """The ids of an answer, with the token that ends it; style "chat": with what the template writes before it."""
    if style == "chat":
        return chat.encode_answer(tokenizer, text)
    segments = [text] * bool(text) if style == "plain" else render_response(text, style)
    return [*tokenizer.encode_segments(segments), tokenizer.eos_id]


def encode_completion(tokenizer: Tokenizer, messages: Sequence[Message], text: str, style: str):
    """(ids, loss weights) of an answered prompt; the loss is on the answer only."""
    return completion(encode_prompt(tokenizer, messages, style), encode_answer(tokenizer, text, style))


def response_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The text of every response of a rollout (numpy arrays), without the token that ended it."""
    ends = rollout.prompt_length + rollout.response_length - rollout.ended
    places = zip(rollout.tokens, rollout.prompt_length, ends, strict=True)
    return [tokenizer.decode(row[start:end]) for row, start, end in places]
