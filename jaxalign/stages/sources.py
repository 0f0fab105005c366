"""Where a stage's prompts, answers and comparisons come from: the embedded world, arithmetic, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxalign.config import Config
from jaxalign.data.formats import render_prompt, render_response
from jaxalign.data.packing import completion
from jaxalign.data.preferences import PreferenceReport, fit_prompts, read_preferences, split_by_prompt, unique_prompts
from jaxalign.data.prompts import read_prompts, split_prompts
from jaxalign.data.tokenizer import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.speaker import begin
from jaxalign.records import Comparison, Message, Prompt, Rollout
from jaxalign.stages import common
from jaxalign.stages.base import StageContext


def data_files(config: Config) -> dict[Path, str]:
    """The outside files of the data source."""
    if config.data.source in ("world", "arithmetic"):
        return {}
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
    context: StageContext, tokenizer: Tokenizer, margins: bool = False
) -> tuple[list[Comparison], list[Comparison], PreferenceReport]:
    """(train, held out, report) of the preference file. Dialogues longer than preference.max_length are cut at a turn.

    Only with `margins` are those of the rows read; which pairs there are does not depend on it.
    """
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
        margins=margins,
    )
    train, held_out = split_by_prompt(pairs, data.held_out_share, context.config.seed)
    return train, held_out, report


def prompts(context: StageContext, tokenizer: Tokenizer, purpose: str, count: int, max_new_tokens: int) -> list[Prompt]:
    """Prompts for "rl" (training) or "evaluate" (held out); those of a file are cut at a turn to leave room for the answer."""
    config, held = context.config, purpose == "evaluate"
    if config.data.source == "world":
        return common.world_of(config).prompts(purpose, count)
    if config.data.source == "arithmetic":
        problems = common.arithmetic_of(config)
        return problems.prompts("held_out" if held and problems.problems("held_out") else "train", count)
    if config.data.source == "prompts_jsonl":
        found = file_prompts(config)[held]
    else:
        train, held_out, _ = human_comparisons(context, tokenizer)
        found = unique_prompts(held_out if held else train)
    room = config.model.max_length - max_new_tokens
    fitted = fit_prompts(found, lambda m: len(encode_prompt(tokenizer, m, config.data.style)), room)
    if not fitted.prompts:
        raise UserError(f"no {purpose} prompt of {config.data.train} fits into {room} tokens; raise model.max_length, or "
                        "data.held_out_share where none is held out")
    if fitted.too_long or fitted.cut:
        print(f"[{context.directory.name}] of {len(found)} {purpose} prompts {len(fitted.cut)} lost their oldest turns and "
              f"{len(fitted.too_long)} were left out, being longer than {room} tokens", flush=True)
    return fitted.prompts[:count]


def file_prompts(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) of the prompt file."""
    data = config.data
    found, broken = read_prompts(Path(data.train).expanduser(), data.max_bad_share, data.limit)
    if broken:
        print(f"{data.train}: {len(found)} prompts read; {len(broken)} broken lines left out, the first being line "
              f"{broken[0].line}: {broken[0].reason}", flush=True)
    return split_prompts(found, data.held_out_share, config.seed)
