"""Arithmetic problems of `data.source=arithmetic`."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between, some_of
from jaxalign.config.reading import when
from jaxalign.config.schema import field

_SOURCE = when("data.source", "arithmetic")


@dataclasses.dataclass(frozen=True)
class ArithmeticConfig(Section):
    """Arithmetic problems with verifiable answers, for data.source=arithmetic."""

    operations: tuple[str, ...] = field(("+",), "Operations on the two numbers.", some_of("+", "-", "*"), _SOURCE)
    largest: int = field(9, "Largest operand; both numbers are from 0 to this.", at_least(1), _SOURCE)
    modulus: int = field(0, "Reduce answers modulo this number; 0: no reduction.", at_least(0),
                         _SOURCE)
    held_out_share: float = field(0.1, "Fraction of the problems held out for evaluation.", between(0.0, 0.9), _SOURCE)
    examples: int = field(10_000, "Number of solved problems in the pretraining text.", at_least(100), _SOURCE)
