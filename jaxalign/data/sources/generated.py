"""The data sources that do not read a file: the embedded world and arithmetic."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator

import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.chat.formats import ASSISTANT, USER
from jaxalign.data.sources.base import PURPOSES, PromptSets, SourceInputs, Split
from jaxalign.data.world import EmbeddedWorld, make_world
from jaxalign.data.world.documents import Document
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclasses.dataclass(frozen=True)
class ArithmeticProblems:
    """All problems "a OP b" with a and b in 0..largest, in an order shuffled by the seed. The answer is the result, taken
    modulo `modulus` if that is above 0. A problem consists of a text ("12+7") and an answer ("19").

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
        return self._splits[split]

    def prompts(self, split: str) -> list[Prompt]:
        """All problems of a split as prompts with the column "answer"."""
        return [
            Prompt(f"arithmetic-{split}-{i:05d}", (Message("user", text),), "arithmetic", {"answer": answer})
            for i, (text, answer) in enumerate(self.problems(split))
        ]


HELD_OUT_TOKENS = 20_000
"""Size of the held-out text of the embedded world, in tokens."""


def world_of(config: Config) -> EmbeddedWorld:
    """The embedded world of a run."""
    section = config.world
    return make_world(config.seed, section.topics, section.held_out_topics, section.ratings, section.reasoned)


def arithmetic_of(config: Config) -> ArithmeticProblems:
    """The arithmetic problems of a run."""
    section = config.arithmetic
    return ArithmeticProblems(
        config.seed, section.largest, section.operations, section.held_out_share, section.modulus
    )


def world_prompts(inputs: SourceInputs) -> PromptSets:
    """The prompt sets of the embedded world: "evaluate" on held-out topics, the others on all topics."""
    world = world_of(inputs.config)
    return PromptSets(**{purpose: world.prompts(purpose) for purpose in PURPOSES}, fitted=True)


def world_text(inputs: SourceInputs) -> Split[Document]:
    """The pretraining text of the embedded world: about `config.world.tokens` tokens, and a smaller held-out text."""
    world = world_of(inputs.config)
    return Split(list(world.documents("train", inputs.config.world.tokens)), list(world.documents("held_out", HELD_OUT_TOKENS)))


def arithmetic_prompts(inputs: SourceInputs) -> Split[Prompt]:
    """All problems. If none are held out, evaluation uses the training problems."""
    problems = arithmetic_of(inputs.config)
    train, held_out = (problems.prompts(split) for split in ("train", "held_out"))
    return Split(train, held_out or train, fitted=True)


def arithmetic_text(inputs: SourceInputs) -> Split[Document]:
    """`config.arithmetic.examples` solved problems, drawn with replacement, and each held-out problem once."""
    config = inputs.config
    problems = arithmetic_of(config)
    rng = np.random.default_rng([config.seed, streams.DATA["arithmetic examples"]])
    train, held_out = (
        [(USER, text, ASSISTANT, answer) for text, answer in problems.problems(split)] for split in ("train", "held_out")
    )
    drawn = [train[i] for i in rng.integers(len(train), size=config.arithmetic.examples)]
    return Split(drawn, held_out or train)
