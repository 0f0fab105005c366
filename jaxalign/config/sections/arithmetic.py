"""Arithmetic problems of `data.source=arithmetic`."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between, some_of
from jaxalign.config.schema import field


@dataclasses.dataclass(frozen=True)
class Arithmetic(Section):
    """Sums and the like with answers that can be verified, for data.source=arithmetic."""

    operations: tuple[str, ...] = field(("+",), "What is done with the two numbers.", some_of("+", "-", "*"))
    largest: int = field(9, "Both numbers are from 0 to this.", at_least(1))
    modulus: int = field(0, "Answers are the remainder by this, 0 to modulus - 1; 0: the plain result.", at_least(0))
    held_out_share: float = field(0.1, "Share of the problems kept for evaluation.", between(0.0, 0.9))
    examples: int = field(10_000, "Worked problems in the pretraining text.", at_least(100))
