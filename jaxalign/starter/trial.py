"""A trial of the first stage: the model answers a few prompts, and criticises and revises its answers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxalign.config import Config
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.sources.asked import read_asked
from jaxalign.data.tokenizers.files import thinking_variables
from jaxalign.feedback.constitution import Constitution
from jaxalign.feedback.critique import is_usable
from jaxalign.models.language_model import load_model
from jaxalign.reasons import REVISION, advice, listed
from jaxalign.records import Revision
from jaxalign.trainers.judging import Judge, revise

PROMPTS = 8
KEPT = ("grown", "cut_off", "critique_refused")
"""The outcomes that `sft.keep` can keep, other than its default."""


class RevisionTrial(NamedTuple):
    """The revisions of a trial."""

    revisions: Sequence[Revision]

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of revisions that are not ordinary, by outcome."""
        found = (one.outcome for one in self.revisions if not is_usable(one.outcome, ("unchanged",)))
        return dict(collections.Counter(found).most_common())

    @property
    def usable(self) -> int:
        return len(self.revisions) - sum(self.outcomes.values())

    @property
    def enough(self) -> bool:
        """Whether at least half of the revisions can be trained on."""
        return 2 * self.usable >= len(self.revisions)

    @property
    def keep(self) -> tuple[str, ...]:
        """Outcomes to keep so that the run can reach its end; empty if there are enough usable revisions."""
        return () if self.enough else tuple(name for name in KEPT if name in self.outcomes)

    def sentence(self) -> str:
        """Says how many revisions can be trained on, and why the others cannot."""
        said = f"{self.usable} of {len(self.revisions)} revisions could be trained on"
        return said + (f"; the others: {listed(self.outcomes, REVISION)}" if self.outcomes else "")

    def remedy(self) -> str:
        """The remedy for the most frequent reason."""
        return advice(self.outcomes)

    def example(self, width: int = 300) -> list[str]:
        """The lines of the first ordinary revision, or of the first one."""
        one = next((one for one in self.revisions if one.outcome is None), self.revisions[0])
        parts = {"prompt": one.prompt.messages[-1].content, "answer": one.response, "critique": one.critique,
                 "revision": one.revision}
        return [f"  {name:<9}{' '.join((text or '').split())[:width]}" for name, text in parts.items()]


def try_revisions(config: Config) -> RevisionTrial:
    """Answers, criticises and revises the first prompts of `data.red_team`, one round.

    Args:
      config: the run's config, whose judge is its own model.
    """
    config = resolve_auto(config)
    section, feedback = config.revise, config.feedback
    policy = load_model(config.model.path, max_length=config.model.max_length, style=config.data.style,
                        compute_dtype=config.model.compute_dtype)
    tokenizer = policy.tokenizer.with_variables(thinking_variables(config.data.thinking))
    policy = dataclasses.replace(policy, tokenizer=tokenizer)
    asked = [item.messages for item in read_asked(config.data.red_team)[:PROMPTS]]
    sampling = {"temperature": section.temperature, "max_new_tokens": section.max_new_tokens, "batch": PROMPTS}
    judge = Judge(policy, Constitution(feedback.constitution), **sampling, templates=feedback.templates,
                  thinking=feedback.thinking, reasoning=bool(feedback.reasoning))
    return RevisionTrial(revise(policy, asked, rounds=1, judge=judge, **sampling))
