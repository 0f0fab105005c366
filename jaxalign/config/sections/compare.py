"""Stage compare: sampling and labelling pairs of answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.reading import unless
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import SamplingFields
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class CompareConfig(SamplingFields):
    """Pairs of sampled answers to each prompt, labelled by the feedback model."""

    prompts: int = field(1536, "Number of prompts; each gives one pair.", at_least(1))
    samples: int = field(4, "Answers sampled per prompt; two of them are compared.", at_least(2))
    choose: str = field("different", "Which answers to compare: the first two that differ (first), the two with the fewest "
                        "common words (different), or the two with the lowest mean log-probability (uncertain).",
                        one_of("first", "different", "uncertain"), unless("samples", 2, "to at least 3"))
    batch: int = field(128, "Prompts per chunk; also the number of rows decoded together. Up to 4 chunks form one queue.",
                       at_least(1))
    helpful_share: float | None = field(None, "Share of the prompts that are those of data.helpful (source prompts_jsonl); the "
                                        "others are not. Fewer prompts are used if it cannot be reached otherwise. None: the "
                                        "mix of the data source.", between(0.0, 1.0))
    temperature: float = like(SamplingFields, "temperature", doc="Sampling temperature; two greedy answers would be identical.")

    def check(self, config: WholeConfig, name: str) -> None:
        check_helpful_share(config, name, self.helpful_share)


def check_helpful_share(config: WholeConfig, name: str, share: float | None) -> None:
    """Checks that there are prompts to mix. name: the section; share: its helpful_share."""
    if share is not None and (config.data.source == "world" or not config.data.helpful):
        raise UserError(f"config.{name}.helpful_share is {share}, but config.data.helpful is empty; set it to a file of "
                        "prompts with config.data.source 'prompts_jsonl', or leave the share at None")
