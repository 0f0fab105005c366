"""Stage revise: critiques and revisions."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field


@dataclasses.dataclass(frozen=True)
class Revise(Section):
    """Critique and revision of the base's answers (Bai et al. 2022, supervised phase)."""

    red_team_prompts: int = field(768, "Prompts whose answers are critiqued and revised.", at_least(1))
    helpful_prompts: int = field(512, "Prompts answered plainly, to keep the model helpful.", at_least(0))
    rounds: int = field(4, "Rounds of critique and revision, a fresh principle each.", at_least(1))
    batch: int = field(128, "Prompts of a chunk; as many rows decode together. Up to 4 chunks are one queue.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; 0 is greedy.", at_least(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer, critique or revision.", at_least(1))
