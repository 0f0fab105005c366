"""The mix of helpful and other prompts that a stage works on, and its statement in the summary of the stage."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxalign.data.sources.base import PromptSets
from jaxalign.data.sources.files import interleaved
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Prompt
from jaxalign.stages.shared import sources
from jaxalign.stages.shared.base import StageContext
from jaxalign.tracking.formatting import percent

RED_TEAM = "red_team"


def stage_prompts(
    context: StageContext, tokenizer: Tokenizer, stage: str, purpose: str, sets: PromptSets | None = None,
    without: Sequence[Prompt] = (),
) -> list[Prompt]:
    """The prompts of stage compare or ppo, of which `helpful_share` of its section are prompts of `config.data.helpful`.

    A share takes the first prompts of both kinds, in proportion in every prefix. If there are too few of one kind, fewer of the
    other are used, so that the share holds.

    Args:
      context: the stage's context.
      tokenizer: the tokenizer of its model.
      stage: the name of the config section, with prompts, max_new_tokens and helpful_share.
      purpose: "compare" or "rl".
      sets: the result of `sources.prompt_sets`; None reads it.
      without: prompts whose dialogues are left out.

    Raises:
      UserError: as for `sources.prompts`, or a share cannot be reached.
    """
    section = getattr(context.config, stage)
    sets = sets or sources.prompt_sets(context, tokenizer)
    excluded = {prompt.messages for prompt in without}
    if section.helpful_share is None:
        count = section.prompts if not excluded or sets.fitted else len(sets.of(purpose))
        every = sources.prompts(context, tokenizer, purpose, count, section.max_new_tokens, sets)
        prompts = [prompt for prompt in every if prompt.messages not in excluded][: section.prompts]
        if not prompts:
            raise UserError(f"all {purpose} prompts of stage {stage} are held out for config.ppo.alarms; lower its prompts, or "
                            "give more prompts")
        return prompts
    helpful = [prompt for prompt in all_helpful(context, tokenizer, sets, section.max_new_tokens)
               if prompt.messages not in excluded]
    kinds = {prompt.messages for prompt in helpful} | excluded
    every = sources.prompts(context, tokenizer, purpose, len(sets.of(purpose)), section.max_new_tokens, sets)
    return mixed([prompt for prompt in every if prompt.messages not in kinds], helpful, section.helpful_share, section.prompts,
                 f"config.{stage}.helpful_share")


def mixed(others: Sequence[Prompt], helpful: Sequence[Prompt], share: float, count: int, field: str) -> list[Prompt]:
    """At most `count` prompts, of which the fraction `share` is helpful, mixed in proportion.

    Raises:
      UserError: there is no prompt of a kind that the share needs, or the columns of the two kinds differ.
    """
    for kind, prompts, needed in (("helpful", helpful, share), ("other", others, 1 - share)):
        if needed and not prompts:
            raise UserError(f"{field} is {share:g}, but no {kind} prompts are left; give more prompts, or change the share")
    if share and share < 1 and set(others[0].columns) != set(helpful[0].columns):
        missing = ", ".join(sorted(set(others[0].columns) ^ set(helpful[0].columns)))
        raise UserError(f"{field} is {share:g}, but the prompts of config.data.rl have columns that those of data.helpful lack "
                        f"({missing}); remove the columns, or leave the share at None")
    total = min([count, *([len(helpful) / share] if share else []), *([len(others) / (1 - share)] if share < 1 else [])])
    number = round(total * share)
    return interleaved([others[: max(round(total) - number, 0)], helpful[:number]])


def all_helpful(context: StageContext, tokenizer: Tokenizer, sets: PromptSets, max_new_tokens: int) -> list[Prompt]:
    """All helpful prompts of the source that fit; empty if it has none."""
    source = sets.of("helpful")
    return [] if source is None else sources.prompts(context, tokenizer, "helpful", len(source), max_new_tokens, sets)


def held_out_helpful(context: StageContext, tokenizer: Tokenizer, sets: PromptSets) -> list[Prompt]:
    """The prompts that `config.ppo.alarms` measures: the last helpful prompts of the source, at most half of them.

    Raises:
      UserError: the source has fewer than two.
    """
    config = context.config
    helpful = all_helpful(context, tokenizer, sets, config.ppo.max_new_tokens)
    if len(helpful) < 2:
        raise UserError(f"config.ppo.alarms.every is {config.ppo.alarms.every}, which needs helpful prompts to measure, but "
                        f"config.data.source {config.data.source!r} has {len(helpful)}: set config.data.helpful to a file of "
                        "prompts, or alarms.every to 0")
    count = min(config.ppo.alarms.prompts, len(helpful) // 2)
    # Columns belong to the prompts of RL; the reward scores these prompts without.
    return [dataclasses.replace(prompt, columns={}) for prompt in helpful[-count:]]


def prompt_shares(context: StageContext, row_sources: Iterable[str], unit: str = "prompts") -> dict[str, Any]:
    """The part of a stage's summary with the share of each source; prints it, with a warning if all are red-team prompts.

    Args:
      context: the stage's context.
      row_sources: the source of each prompt or row, such as "red_team" or "helpful".
      unit: the name of the rows in the sentence.
    """
    counts = collections.Counter(row_sources)
    total, stage = sum(counts.values()), context.directory.name
    shares = {source: count / total for source, count in sorted(counts.items())}
    listed = ", ".join(f"{percent(share)} {source}" for source, share in shares.items())
    print(f"[{stage}] {total:,} {unit}: {listed}", flush=True)
    if set(counts) == {RED_TEAM}:
        print(f"[{stage}] warning: all {total:,} {unit} are red-team prompts; a model that learns from no helpful prompts "
              "becomes evasive: set config.data.helpful to a file of prompts", flush=True)
    return {"prompt_shares": shares}
