"""Where a stage's prompts, answers and comparisons come from: the embedded world, or a file of human preferences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.formats import render_prompt, render_response
from jaxalign.data.packing import completion
from jaxalign.data.preferences import PreferenceReport, fit_prompts, read_preferences, split_by_prompt, unique_prompts
from jaxalign.data.tokenizer import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.speaker import begin
from jaxalign.records import Comparison, Message, Prompt, Rollout
from jaxalign.stages import common
from jaxalign.stages.base import StageContext


def data_files(config: Config) -> dict[Path, str]:
    """The outside files of the data source."""
    if config.data.source == "world":
        return {}
    if not config.data.train:
        raise UserError(
            "config.data.train is empty; with data.source=preferences_jsonl give the path of a JSONL file (.gz too) whose "
            "rows hold 'chosen' and 'rejected'"
        )
    return {Path(config.data.train).expanduser(): "data.train"}


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message], style: str) -> list[int]:
    """The ids of a dialogue up to where the answer begins."""
    return begin(tokenizer) + tokenizer.encode_segments(render_prompt(messages, style))


def encode_answer(tokenizer: Tokenizer, text: str, style: str) -> list[int]:
    """The ids of an answer with its eos."""
    return [*tokenizer.encode_segments(render_response(text, style)), tokenizer.eos_id]


def encode_completion(tokenizer: Tokenizer, messages: Sequence[Message], text: str, style: str):
    """(ids, loss weights) of an answered prompt; the loss is on the answer."""
    return completion(encode_prompt(tokenizer, messages, style), encode_answer(tokenizer, text, style))


def response_texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The text of every response of a rollout (numpy arrays), without the token that ended it."""
    ends = rollout.prompt_length + rollout.response_length - rollout.ended
    places = zip(rollout.tokens, rollout.prompt_length, ends, strict=True)
    return [tokenizer.decode(row[start:end]) for row, start, end in places]


def human_comparisons(
    context: StageContext, tokenizer: Tokenizer
) -> tuple[list[Comparison], list[Comparison], PreferenceReport]:
    """(train, held out, report) of the preference file. Dialogues longer than preference.max_length are cut at a turn."""
    data = context.config.data

    def count(messages, answer: str) -> int:
        return len(encode_completion(tokenizer, messages, answer, data.style)[0])

    pairs, report = read_preferences(
        Path(data.train).expanduser(),
        differing_contexts=data.differing_contexts,
        empty_answers=data.empty_answers,
        max_bad_share=data.max_bad_share,
        limit=data.limit,
        count_tokens=count,
        max_tokens=min(context.config.preference.max_length, context.config.model.max_length),
    )
    train, held_out = split_by_prompt(pairs, data.held_out_share, context.config.seed)
    return train, held_out, report


def prompts(context: StageContext, tokenizer: Tokenizer, purpose: str, count: int, max_new_tokens: int) -> list[Prompt]:
    """Prompts for "rl" (training dialogues) or "evaluate" (held-out ones), cut at a turn to leave room for the answer."""
    config = context.config
    if config.data.source == "world":
        return common.world_of(config).prompts(purpose, count)
    train, held_out, _ = human_comparisons(context, tokenizer)
    found = unique_prompts(held_out if purpose == "evaluate" else train)
    room = config.model.max_length - max_new_tokens
    fitted = fit_prompts(found, lambda m: len(encode_prompt(tokenizer, m, config.data.style)), room)
    if not fitted.prompts:
        raise UserError(f"no {purpose} prompt of {config.data.train} fits into {room} tokens; raise model.max_length")
    return fitted.prompts[:count]
