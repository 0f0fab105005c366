"""Stage compare: sampling and labelling pairs of answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, one_of
from jaxalign.config.reading import unless
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import Sampling


@dataclasses.dataclass(frozen=True)
class Compare(Sampling):
    """Pairs of sampled answers to each prompt, labelled by the feedback model."""

    prompts: int = field(2048, "Number of prompts; each gives one pair.", at_least(1))
    samples: int = field(2, "Answers sampled per prompt; two of them are compared.", at_least(2))
    choose: str = field("different", "Which answers to compare: the first two that differ (first), the two with the fewest "
                        "common words (different), or the two with the lowest mean log-probability (uncertain).",
                        one_of("first", "different", "uncertain"), unless("samples", 2, "to at least 3"))
    batch: int = field(128, "Prompts per chunk; also the number of rows decoded together. Up to 4 chunks form one queue.",
                       at_least(1))
    temperature: float = like(Sampling, "temperature", doc="Sampling temperature; two greedy answers would be identical.")
