"""Warns about held-out dialogues that a custom data source also gives for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxalign.data.sources.base import PURPOSES, PromptSets, Split, dialogue_digests, read_rows
from jaxalign.data.sources.lazy import LazyRecords
from jaxalign.stages.shared.base import StageContext

_MOST_COMPARED = 100_000
"""The number of prompts of each part of a custom source that are compared with the held-out ones."""


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
