"""Stage revise: critiques and revisions."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import SamplingFields


@dataclasses.dataclass(frozen=True)
class ReviseConfig(SamplingFields):
    """Critique and revision of the base model's answers (Bai et al. 2022, supervised phase)."""

    red_team_prompts: int = field(768, "Number of prompts whose answers are critiqued and revised.", at_least(1))
    helpful_prompts: int = field(512, "Number of prompts answered without critique, to keep the model helpful.", at_least(0))
    rounds: int = field(4, "Rounds of critique and revision, each with a new principle.", at_least(1))
    batch: int = field(128, "Prompts per chunk; also the number of rows decoded together. Up to 4 chunks form one queue.",
                       at_least(1))
    max_growth: float = field(8.0, "A revision longer than this many times the answer, in characters, is not trained on unless "
                              "sft.keep has 'grown'; 0: no limit.", at_least(0))
    temperature: float = like(SamplingFields, "temperature", default=0.7, doc="Sampling temperature; 0 is greedy.",
                              check=at_least(0))
    max_new_tokens: int = like(SamplingFields, "max_new_tokens",
                               doc="Maximum length of an answer, critique or revision, in tokens.")
