"""Stage compare: labelled pairs of answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import above, at_least, between
from jaxalign.config.schema import field


@dataclasses.dataclass(frozen=True)
class Compare(Section):
    """Two answers a prompt, labelled by the feedback model."""

    prompts: int = field(2048, "Prompts answered twice.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(1.0, "Sampling temperature; two greedy answers would be equal.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
