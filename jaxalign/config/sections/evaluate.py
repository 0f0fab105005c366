"""Stage evaluate: measures on held-out prompts."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field


@dataclasses.dataclass(frozen=True)
class Evaluate(Section):
    """Gold measures, win rates, KL and length, on held-out prompts."""

    prompts: int = field(512, "Prompts answered by each model.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; 0 is greedy.", at_least(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    win_rate_prompts: int = field(128, "Prompts on which the labeller compares models; 0: none.", at_least(0))
    examples: int = field(12, "Prompts shown in the report, answered by each model.", at_least(0))
