"""What `jaxalign.preview` shows: the first rows of a stage, encoded by the same functions that the stage uses, and the data
itself: the columns of each file, their mapping, and the first row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from jaxalign import streams
from jaxalign.config import Config, DPOConfig, PreferenceConfig
from jaxalign.config.sections.data import parse_columns
from jaxalign.data.chat import styles
from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.data.sources.rows import open_rows
from jaxalign.data.sources.tables import TableRows
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.rewards import reward_records
from jaxalign.registry.stages import STAGES, stages_in_order
from jaxalign.rl.iteration import PromptStream
from jaxalign.stages.shared import engines, judge_preview, labelled, reads, run_models, sources, windows
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.manifest import DONE, read_manifest
from jaxalign.stages.shared.preference_pairs import preference_pairs
from jaxalign.tracking.tokens import GIVEN, LEARNT, SCORED, TokenRow
from jaxalign.trainers import answers, scoring
from jaxalign.trainers.sft import packed

RATE = "rate"
"""The name of the preview of the judge's ratings, which are a part of stage ppo."""
_MOST_CHARACTERS = 400


def choose_stage(config: Config, asked: str) -> str:
    """The stage `asked` or `RATE`, or if that is empty the config's first stage that has a preview.

    Raises:
      UserError: the stage has no preview, or none of the config's stages has one.
    """
    planned = [record.name for record in stages_in_order(config.stages) if record.preview is not None]
    shown = tuple(dict.fromkeys((*(record.name for record in STAGES if record.preview is not None), RATE, *planned)))
    if asked and asked not in shown:
        near = get_close_matches(asked, shown, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--stage is {asked!r}; it must be one of {', '.join(shown)}{hint}")
    if not asked and not planned:
        raise UserError(f"config.stages has none of the stages that can be previewed ({', '.join(shown)}); "
                        "name one with --stage")
    return asked or planned[0]


def rows(context: StageContext, stage: str, count: int) -> tuple[Tokenizer, list[TokenRow]]:
    """The first `count` examples of a stage, or fewer if it has fewer. A pair makes two rows, and each request to a judge one.

    Raises:
      UserError: an earlier stage that makes its data has not been run in the work directory.
    """
    _require(context, stage, *reads.base_stages(context.config))
    tokenizer = run_models.load_tokenizer(context)
    records = {record.name: record for record in (*STAGES, *stages_in_order(context.config.stages))}
    preview = rate_rows if stage == RATE else records[stage].load("preview")
    return tokenizer, preview(context, tokenizer, count)


def _require(context: StageContext, stage: str, *sources: str) -> None:
    for name in sources:
        manifest = read_manifest(context.input_directory(name))
        if manifest is None or manifest.status != DONE:
            raise UserError(f"the rows of {stage} come from stage {name}, which has not been run in {context.workdir}; run it "
                            "first, or give the --workdir of a run")


def dialogue_row(tokenizer: Tokenizer, messages: Sequence[Message], title: str) -> TokenRow:
    """One dialogue in the chat template. The loss covers its last answer, or nothing if the dialogue ends with a question."""
    if messages and messages[-1].role == "assistant":
        ids, weights = styles.encode_completion(tokenizer, messages[:-1], messages[-1].content, "chat")
        return TokenRow(title, ids, "".join(LEARNT if weight else GIVEN for weight in weights))
    ids = styles.encode_prompt(tokenizer, messages, "chat")
    return TokenRow(title, ids, GIVEN * len(ids), ("no answer yet",))


def _cut(full: int, kept: int) -> tuple[str, ...]:
    return (f"cut from {full} to {kept}",) if kept < full else ()


def sft_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The first `count` rows of stage sft."""
    _require(context, "sft", *sources.made_in(context.config, "revise"))
    config, out = context.config, []
    if sources.in_windows(config, "revise"):
        found = windows.first_rows(context, tokenizer, labelled.answer_kind(config), count)
        pairs: Sequence[labelled.Answered] = list(map(labelled.answer_of, found))
    else:
        pairs = labelled.answered(context, tokenizer)[0]
    for number, pair in enumerate(pairs[:count], start=1):
        batch, _ = packed(tokenizer, [pair], config.data.style, config.sft.row_length)
        length = int(np.sum(batch.segment_ids[0] > 0))
        full = len(styles.encode_completion(tokenizer, *pair, config.data.style)[0])
        marks = "".join(LEARNT if weight else GIVEN for weight in batch.loss_mask[0, :length])
        out.append(TokenRow(f"sft {number}", batch.tokens[0, :length].tolist(), marks, _cut(full, length)))
    return out


def preference_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The rows of the first `count` pairs of stage preference. Reads the files of `preference.human` too."""
    _require(context, "preference", *sources.made_in(context.config, "compare"))
    config, section, out = context.config, context.config.preference, []
    if section.human:
        pairs: Sequence[Comparison] = preference_pairs(context, tokenizer).train[:count]
    else:
        pairs = _labelled(context, tokenizer, section, count, section.margin_weight > 0)
    batch = scoring.pair_arrays(tokenizer, pairs, config.data.style, section.max_length)
    for number, pair in enumerate(pairs):
        for side, answer in enumerate((pair.response_a, pair.response_b)):
            length = int(batch.length[number, side])
            full = len(styles.encode_completion(tokenizer, pair.prompt.messages, answer, config.data.style)[0])
            notes = (f"better with probability {pair.label if side == 0 else 1 - pair.label:.3g}", *_cut(full, length))
            ids, marks = batch.tokens[number, side, :length].tolist(), GIVEN * (length - 1) + SCORED
            out.append(TokenRow(f"preference {number + 1}{'ab'[side]}", ids, marks, notes))
    return out


def dpo_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The rows of the first `count` pairs of stage dpo."""
    _require(context, "dpo", *sources.made_in(context.config, "compare"))
    config, out = context.config, []
    pairs = _labelled(context, tokenizer, config.dpo, count)
    batch = answers.pair_arrays(tokenizer, pairs, config.data.style, config.dpo)
    for number, pair in enumerate(map(answers.oriented, pairs)):
        for side, answer in enumerate((pair.response_a, pair.response_b)):
            prompt, length = int(batch.prompt_length[number, side]), int(batch.length[number, side])
            full = len(styles.encode_completion(tokenizer, pair.prompt.messages, answer, config.data.style)[0])
            notes = (("the better answer", "the worse answer")[side], *_cut(full, length))
            ids, marks = batch.tokens[number, side, :length].tolist(), GIVEN * prompt + LEARNT * (length - prompt)
            out.append(TokenRow(f"dpo {number + 1}{'ab'[side]}", ids, marks, notes))
    return out


def _labelled(
    context: StageContext, tokenizer: Tokenizer, section: PreferenceConfig | DPOConfig, count: int, margins: bool = False
) -> Sequence[Comparison]:
    """The first `count` pairs to train on."""
    if sources.in_windows(context.config, "compare"):
        return windows.first_rows(context, tokenizer, "comparisons", count)
    return labelled.labelled_split(context, tokenizer, section, margins)[0][:count]


def ppo_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The first `count` prompts of stage ppo."""
    prompts = _prompts(context, tokenizer, count, "ppo", "rl")
    return _prompt_rows(context, tokenizer, prompts, "ppo", "which are trained on, ")


def revise_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The first `count` red-team prompts of stage revise, each followed by the judge's requests."""
    prompts = _prompts(context, tokenizer, count, "revise", "red_team")
    requests = judge_preview.revise_requests(context, prompts)
    return _prompt_rows(context, tokenizer, prompts, "revise", "which the judge critiques and revises, ", requests)


def compare_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The first `count` prompts of stage compare, each followed by the judge's requests."""
    prompts = _prompts(context, tokenizer, count, "compare", "compare")
    use = f"{context.config.compare.samples} times, of which the judge compares two, "
    return _prompt_rows(context, tokenizer, prompts, "compare", use, judge_preview.compare_requests(context, prompts))


def rate_rows(context: StageContext, tokenizer: Tokenizer, count: int) -> list[TokenRow]:
    """The first `count` prompts of the first iteration of stage ppo, each followed by the judge's requests.

    Raises:
      UserError: no part of the reward asks the judge.
    """
    source = context.config.reward.source
    if not any(record.asks_judge for record in reward_records(source)):
        raise UserError(f"--stage={RATE} shows the requests of the reward 'ai_feedback', but config.reward.source is "
                        f"{source!r}; set it to 'ai_feedback', or give another --stage")
    section, seed = context.config.ppo, context.config.seed
    every = _prompts(context, tokenizer, section.prompts, "ppo", "rl")
    batch = PromptStream(every, every, section.batch, section.group_size, seed, streams.LOADERS["ppo"]).at(0)
    prompts, numbers = (list(part[:: section.group_size][:count]) for part in (batch.prompts, batch.rows))
    requests = judge_preview.rate_requests(context, prompts, numbers)
    return _prompt_rows(context, tokenizer, prompts, "ppo", "which the judge rates, ", requests)


def _prompts(context: StageContext, tokenizer: Tokenizer, count: int, stage: str, purpose: str) -> list[Prompt]:
    """The first `count` prompts of a stage for a purpose."""
    context = dataclasses.replace(context, directory=context.workdir / stage)
    section, alarms = getattr(context.config, stage), stage == "ppo" and context.config.ppo.alarms.every
    if stage == "revise" or (section.helpful_share is None and not alarms):
        return sources.prompts(context, tokenizer, purpose, count, section.max_new_tokens)
    sets = sources.prompt_sets(context, tokenizer)
    measured = sources.held_out_helpful(context, tokenizer, sets) if alarms else []
    return sources.stage_prompts(context, tokenizer, stage, purpose, sets, measured)[:count]


def _prompt_rows(
    context: StageContext, tokenizer: Tokenizer, prompts: Sequence[Prompt], stage: str, use: str,
    requests: Sequence[Sequence[TokenRow]] = (),
) -> list[TokenRow]:
    """Prompts of a stage, each with a note on the answer that the policy samples, and followed by its requests.

    use: the purpose of the answer.
    """
    config, section = context.config, getattr(context.config, stage)
    stops = ", ".join(tokenizer.piece(token) for token in engines.sampling(section, tokenizer, config.data.style).stop_ids)
    note = f"then up to {section.max_new_tokens} sampled tokens, {use}up to the first of {stops}"
    rows = []
    for number, prompt in enumerate(prompts):
        ids = styles.encode_prompt(tokenizer, prompt.messages, config.data.style)
        rows.append(TokenRow(f"{stage} {number + 1}", ids, GIVEN * len(ids), (note,)))
        rows += requests[number] if requests else ()
    return rows


def data_lines(config: Config) -> list[str]:
    """Lines on the tables of `config.data`, and with `data.columns` on all of its files.

    Raises:
      UserError: a file cannot be read, or a mapped column does not exist.
    """
    if not data_source(config).rows:
        return []
    lines, mapping = [], parse_columns(config.data.columns)
    for path, field in reads.data_files(config).items():
        prompts = "" if data_source(config).prompts is None else config.data.prompt_field
        rows = open_rows(path, config.data.columns, prompts)
        if not isinstance(rows, TableRows) and not mapping:
            continue
        first = next(iter(rows), None)
        names = rows.columns or (() if first is None or isinstance(first, BrokenLine) else tuple(first.value))
        count = f"{len(rows):,} rows, " if isinstance(rows, TableRows) else ""
        lines.append(f"config.{field}: {path} ({count}fields {', '.join(names)})")
        lines += [f"  field {name} is read from column {column}" for name, column in mapping.items()]
        if first is not None:
            shown = first.reason if isinstance(first, BrokenLine) else json.dumps(first.value, ensure_ascii=False)
            more = "..." if len(shown) > _MOST_CHARACTERS else ""
            lines.append(f"  {rows.place(first.line)}: {shown[:_MOST_CHARACTERS]}{more}")
    return lines
