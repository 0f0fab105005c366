"""The feedback model and its labels."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.reading import unless
from jaxalign.config.schema import field
from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError
from jaxalign.registry.judges import judge_record

_REASONING = unless("reasoning", False, "to True")


@dataclasses.dataclass(frozen=True)
class Feedback(Section):
    """The feedback model: its principles and its labels."""

    constitution: str = field("default", "Name of a built-in constitution, or path of a JSON file.")
    judge: str = field("local", "Source of critiques, revisions, comparisons and ratings: local (the run's base model), or "
                       "'package.module:name' or 'FILE.py:name' of your own class, object or JudgeRecord; see "
                       "docs/extending.md.")
    invert: bool = field(False, "Invert every label. This is a control experiment: it should make the policy worse.")
    reasoning: bool = field(True, "Let the feedback model reason before it answers (chain of thought).")
    clamp_low: float = field(0.1, "Lower bound of labels after reasoning.", between(0.0, 0.5), _REASONING)
    clamp_high: float = field(0.9, "Upper bound of labels after reasoning.", between(0.5, 1.0), _REASONING)
    principles_per_comparison: int = field(1, "Principles drawn per comparison; their labels are averaged.", at_least(1))
    undecided_margin: float = field(0.02, "A label closer to 0.5 than this is undecided.", between(0.0, 0.5))
    undecided: str = field("drop", "Keep undecided comparisons with label 0.5 (half), or drop them.", one_of("half", "drop"))
    reasoning_temperature: float = field(0.0, "Sampling temperature of the reasoning; 0 is greedy.", at_least(0), _REASONING)
    max_reasoning_tokens: int = field(160, "Maximum length of the reasoning, in tokens.", at_least(1), _REASONING)

    def check(self, config: WholeConfig, name: str) -> None:
        """Checks that the judge exists and that the local judge has space for its reasoning."""
        if not judge_record(self.judge, "config.feedback.judge").runs_base:
            return
        reading = {"revise", "compare", "online_dpo"}.intersection(config.stages)
        rating = "ppo" in config.stages and "ai_feedback" in names_in(config.reward.source)
        if (reading or rating) and self.reasoning and self.max_reasoning_tokens >= config.model.max_length:
            raise UserError(f"config.feedback.max_reasoning_tokens is {self.max_reasoning_tokens}; it must be below "
                            f"config.model.max_length ({config.model.max_length}), which includes the dialogue")
