"""Sampling with few programs, for tests of other things. Tests of `rollout/` and of other runs cover the programs left out."""

from __future__ import annotations

import pytest

from jaxalign.rollout import layouts


def sample_with_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Decode all rows until the end of a queue: batches that shrink need at least twice as many decoding programs. Prefill one
    prompt with the program for many: two sizes need twice as many programs to prefill prompts and to insert them into rings."""
    patch.setattr(layouts, "SHARES", (1,))
    patch.setattr(layouts, "SMALLER", 1)
