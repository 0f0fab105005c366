"""Arithmetic problems with verifiable answers: operations on small whole numbers, split into train and held-out problems.

A problem consists of a text ("12+7") and an answer ("19"). The problems depend only on the seed and the settings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator

import numpy as np

from jaxalign import streams
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt
from jaxalign.registry.data_sources import DATA_SOURCES

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ALPHABET = DATA_SOURCES.get("arithmetic").alphabet
"""Every character of problems and answers: the digits and OPERATIONS."""


@dataclasses.dataclass(frozen=True)
class ArithmeticProblems:
    """All problems "a OP b" with a and b in 0..largest, in an order shuffled by the seed. The answer is the result, taken
    modulo `modulus` if that is above 0.

    Raises:
        UserError: the held-out share leaves no problem for training.
    """

    seed: int
    largest: int
    operations: tuple[str, ...]
    held_out_share: float
    modulus: int = 0

    def __post_init__(self):
        total = len(self.operations) * (self.largest + 1) ** 2
        if round(self.held_out_share * total) >= total:
            raise UserError(f"config.arithmetic.held_out_share is {self.held_out_share}; of {total} problems it leaves none "
                            "for training: lower it")

    @functools.cached_property
    def _splits(self) -> dict[str, tuple[tuple[str, str], ...]]:
        numbers, problems = range(self.largest + 1), []
        for operation, a, b in itertools.product(self.operations, numbers, numbers):
            result = OPERATIONS[operation](a, b)
            problems.append((f"{a}{operation}{b}", str(result % self.modulus if self.modulus else result)))
        order = np.random.default_rng([self.seed, streams.DATA["arithmetic order"]]).permutation(len(problems))
        shuffled = tuple(problems[i] for i in order)
        held_out = round(self.held_out_share * len(problems))
        return {"train": shuffled[held_out:], "held_out": shuffled[:held_out]}

    def problems(self, split: str) -> tuple[tuple[str, str], ...]:
        """(text, answer) of every problem in the split "train" or "held_out"."""
        if split not in self._splits:
            raise ValueError(f"split is {split!r}; 'train' or 'held_out' is expected")
        return self._splits[split]

    def prompts(self, split: str, count: int) -> list[Prompt]:
        """The first `count` problems of a split, or all if there are fewer, as prompts with the column "answer"."""
        return [
            Prompt(f"arithmetic-{split}-{i:05d}", (Message("user", text),), "arithmetic", {"answer": answer})
            for i, (text, answer) in enumerate(self.problems(split)[:count])
        ]
