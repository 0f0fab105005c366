"""The feedback model and its labels."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field
from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class Feedback(Section):
    """The feedback model: which principles it holds to, and how its labels are made."""

    constitution: str = field("default", "Name of one that comes with the package, or a JSON file.")
    invert: bool = field(False, "Turn every label round: a control, which should make things worse.")
    reasoning: bool = field(True, "Let the feedback model think before it answers (chain of thought).")
    clamp_low: float = field(0.1, "Labels made with reasoning are not below this.", between(0.0, 0.5))
    clamp_high: float = field(0.9, "Labels made with reasoning are not above this.", between(0.5, 1.0))
    principles_per_comparison: int = field(1, "Principles drawn a comparison; their labels are averaged.", at_least(1))
    undecided_margin: float = field(0.02, "A label closer to 0.5 than this is undecided.", between(0.0, 0.5))
    undecided: str = field("drop", "An undecided comparison is kept with the label 0.5, or dropped.",
                           one_of("half", "drop"))
    reasoning_temperature: float = field(0.0, "Sampling temperature of the reasoning; 0 is greedy.", at_least(0))
    max_reasoning_tokens: int = field(160, "Longest reasoning.", at_least(1))

    def check(self, config: WholeConfig, name: str) -> None:
        reading = {"revise", "compare", "online_dpo"}.intersection(config.stages)
        rating = "ppo" in config.stages and "ai_feedback" in names_in(config.reward.source)
        if (reading or rating) and self.reasoning and self.max_reasoning_tokens >= config.model.max_length:
            raise UserError(f"config.feedback.max_reasoning_tokens is {self.max_reasoning_tokens}; it must be below "
                            f"config.model.max_length ({config.model.max_length}), which includes the dialogue")
