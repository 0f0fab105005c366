"""Fits rows and prompts into the lengths of a run, prints how many were cut or left out, and warns of held-out dialogues that a
custom data source also gives for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.sources.base import (
    PURPOSES,
    CountTokens,
    FittedPrompts,
    PromptSets,
    Split,
    dialogue_digests,
    fit_answered,
    read_rows,
)
from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.stages.shared.base import StageContext

_MOST_COMPARED = 100_000
"""The number of prompts of each part of a custom source that are compared with the held-out ones."""


def token_counter(tokenizer: Tokenizer, config: Config) -> CountTokens:
    """Counts the tokens of a context with an answer in the run's style."""
    return lambda messages, answer: len(styles.encode_completion(tokenizer, messages, answer, config.data.style)[0])


def fit_rows(
    context: StageContext, tokenizer: Tokenizer, parts: Sequence[Sequence], max_length: int, where: str
) -> list[list]:
    """The rows of each part that have at most `max_length` tokens, their dialogues cut at a turn if needed.

    Prints and records how many rows of all parts were cut, and how many do not fit or are rejected by the chat template or the
    style.

    Args:
      parts: rows with answers, such as those to train on and those held out.
      max_length: the maximum length of a dialogue with its answer; model.max_length is a further limit.
      where: the origin of the rows for error messages.

    Raises:
      UserError: none of the rows of a part fits.
    """
    config = context.config
    most = min(max_length, config.model.max_length)
    fitted = [fit_answered(rows, token_counter(tokenizer, config), most) for rows in parts]
    for rows, (kept, _, _) in zip(parts, fitted, strict=True):
        if rows and not kept:
            raise UserError(f"{where}: none of its {len(rows)} rows fits into {most} tokens; raise config.model.max_length, "
                            "and max_length of the stage or, for the rows of a data source, config.preference.max_length")
    total, dropped, cut = sum(map(len, parts)), sum(part[1] for part in fitted), sum(part[2] for part in fitted)
    if dropped or cut:
        context.left_out[where] = {"total": total, "dropped": dropped, "cut": cut}
    if cut:
        print(f"[{context.title}] {cut} of {total} rows of {where} lost their oldest turns, since they exceed {most} tokens",
              flush=True)
    if dropped:
        print(f"[{context.title}] {dropped} of {total} rows of {where} were left out: they do not fit into {most} "
              f"tokens, or {rejecting(config)} them", flush=True)
    return [kept for kept, _, _ in fitted]


def rejecting(config: Config) -> str:
    """The subject of a sentence about dialogues that cannot be encoded."""
    return "the model's chat template rejects" if config.data.style == "chat" else f"the style {config.data.style!r} rejects"


def report_fitting(context: StageContext, purpose: str, total: int, fitted: FittedPrompts, most: int) -> None:
    """Prints and records the prompts that were cut or left out."""
    config, stage = context.config, context.title
    dropped = len(fitted.too_long) + len(fitted.refused)
    if dropped or fitted.cut:
        context.left_out[f"the {purpose} prompts"] = {"total": total, "dropped": dropped, "cut": len(fitted.cut)}
    if fitted.too_long or fitted.cut:
        print(f"[{stage}] {len(fitted.cut)} of {total} {purpose} prompts lost their oldest turns and {len(fitted.too_long)} "
              f"were left out, since they exceed {most} tokens", flush=True)
    if fitted.refused:
        listed = ", ".join(fitted.refused[:5]) + (", ..." if len(fitted.refused) > 5 else "")
        print(f"[{stage}] {len(fitted.refused)} of {total} {purpose} prompts were left out, since {rejecting(config)} them "
              f"({listed})", flush=True)


def warn_of_shared_prompts(context: StageContext, given: Any, where: str) -> None:
    """`warn_of_shared` for the first `_MOST_COMPARED` prompts of each part, if the source has split its prompts itself.

    Args:
      context: the context of the stage.
      given: what the source returned.
      where: the origin of the prompts for error messages.
    """
    if isinstance(given, Split):
        trained, held_out = [given.train], given.held_out
    elif isinstance(given, PromptSets):
        trained = [part for purpose in PURPOSES if purpose != "evaluate" and (part := getattr(given, purpose)) is not None]
        held_out = given.evaluate
    else:
        return
    if held_out is None or not trained:
        return
    held_out, *trained = (read_rows(part, "prompts", where, _MOST_COMPARED) for part in (held_out, *trained))
    warn_of_shared(context, trained, held_out)


def warn_of_shared(context: StageContext, trained: Sequence[Sequence], held_out: Sequence) -> None:
    """Prints a warning if held-out dialogues are also in the parts to train on. Rows of tables are not read again for this."""
    if any(isinstance(part, LazyRecords) for part in (held_out, *trained)):
        return
    held = np.unique(dialogue_digests(held_out))
    shared = int(np.isin(held, np.concatenate([dialogue_digests(part) for part in trained])).sum())
    if shared:
        print(f"[{context.title}] warning: {shared:,} of {len(held):,} held-out dialogues are also trained on, so held-out "
              "measures are too good; remove them from one side", flush=True)
