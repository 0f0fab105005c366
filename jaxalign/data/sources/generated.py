"""The data sources that do not read a file: the embedded world and arithmetic."""

from __future__ import annotations

import numpy as np

from jaxalign import streams
from jaxalign.config import Config
from jaxalign.data.chat.formats import ASSISTANT, USER
from jaxalign.data.sources.arithmetic import ArithmeticProblems
from jaxalign.data.sources.base import PURPOSES, PromptSets, SourceInputs, Split
from jaxalign.data.world import EmbeddedWorld, make_world
from jaxalign.data.world.documents import Document
from jaxalign.records import Prompt

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
    train, held_out = (problems.prompts(split, len(problems.problems(split))) for split in ("train", "held_out"))
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
