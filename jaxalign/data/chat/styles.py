"""Dialogues as token ids in each of the styles of `config.data.style`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.formats import render_prompt, render_response
from jaxalign.data.packing import completion
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.records import Message, Rollout


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], style: str) -> list[int]:
    """The ids of a dialogue up to where the answer begins, bos included; style "chat": as the model's template writes it."""
    if style == "chat":
        return chat.encode_prompt(tokenizer, messages)
    return list(tokenizer.begin_ids) + tokenizer.encode_segments(render_prompt(messages, style))


def encode_answer(tokenizer: Tokenizer, text: str, style: str) -> list[int]:
    """The ids of an answer with its eos; style "chat": with what the template writes before it, and its end of a turn."""
    if style == "chat":
        return chat.encode_answer(tokenizer, text)
    return [*tokenizer.encode_segments(render_response(text, style)), tokenizer.eos_id]


def encode_completion(tokenizer: Tokenizer, messages: Sequence[Message], text: str, style: str):
    """(ids, loss weights) of an answered prompt; the loss is on the answer."""
    return completion(encode_prompt(tokenizer, messages, style), encode_answer(tokenizer, text, style))


def response_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The text of every response of a rollout (numpy arrays), without the token that ended it."""
    ends = rollout.prompt_length + rollout.response_length - rollout.ended
    places = zip(rollout.tokens, rollout.prompt_length, ends, strict=True)
    return [tokenizer.decode(row[start:end]) for row, start, end in places]
