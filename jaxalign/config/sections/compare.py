"""Stage compare: sampling and labelling pairs of answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least
from jaxalign.config.schema import field, like
from jaxalign.config.sections.shared import Sampling


@dataclasses.dataclass(frozen=True)
class Compare(Sampling):
    """Pairs of sampled answers to each prompt, labelled by the feedback model."""

    prompts: int = field(2048, "Number of prompts; each is answered twice.", at_least(1))
    batch: int = field(128, "Prompts per chunk; also the number of rows decoded together. Up to 4 chunks form one queue.",
                       at_least(1))
    temperature: float = like(Sampling, "temperature", doc="Sampling temperature; two greedy answers would be identical.")
