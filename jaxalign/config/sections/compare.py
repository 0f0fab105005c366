"""Stage compare: labelled pairs of answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import Sampling


@dataclasses.dataclass(frozen=True)
class Compare(Sampling):
    """Two answers to each prompt, labelled by the feedback model."""

    prompts: int = field(2048, "Prompts answered twice.", at_least(1))
    batch: int = field(128, "Prompts in a chunk, and rows that decode together. Up to 4 chunks form one queue.", at_least(1))
    temperature: float = like(Sampling, "temperature", doc="Sampling temperature; two greedy answers would be equal.")
