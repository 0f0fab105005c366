"""The typed records that pass between packages. Text records are plain frozen dataclasses; array records are pytrees.

Dimension letters: B batch, T time (tokens of a row), N response tokens, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a dialogue. `role` is "user" or "assistant"."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A dialogue without the assistant's answer; its last message is the user's.

    `id` is unique and stable; `source` says which prompt set it came from ("red_team", "helpful", ...). `columns` are JSON
    values that belong to it (the wanted answer, say): rewards read them, models do not.
    """

    id: str
    messages: tuple[Message, ...]
    source: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class Principle:
    """One principle of a constitution, in the three wordings its uses need."""

    name: str
    critique_request: str
    revision_request: str
    comparison: str


@dataclasses.dataclass(frozen=True)
class Revision:
    """One round of critique and revision of one response; round 0 is a plain helpful sample (no critique)."""

    prompt: Prompt
    round: int
    principle: str | None
    response: str
    critique: str | None
    revision: str | None
    complete: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pair of responses with a soft label: the probability that `response_a` is the better one.

    margin, where it is known, says by how much the better one is better.
    """

    prompt: Prompt
    response_a: str
    response_b: str
    label: float
    principles: tuple[str, ...] = ()
    label_ab: float | None = None
    label_ba: float | None = None
    decided: bool = True
    reasoning_ab: str | None = None
    reasoning_ba: str | None = None
    margin: float | None = None


@dataclasses.dataclass(frozen=True)
class Judgement:
    """One response with a verdict: good (desirable) or bad."""

    prompt: Prompt
    response: str
    desirable: bool


def _array_record(cls: type) -> type:
    cls = dataclasses.dataclass(frozen=True)(cls)
    jax.tree_util.register_dataclass(cls)
    return cls


@_array_record
class PackedBatch:
    """Rows of several documents, which segment ids tell apart (0 is padding). All int32 [B, T] but the mask.

    loss_mask[b, t] (float32) weighs the prediction of tokens[b, t] from what stands before it in its segment.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    loss_mask: Any


@_array_record
class Rollout:
    """Sampled responses. Row b holds its prompt, then its response, without a gap, then padding.

    tokens int32 [B, T]; prompt_length and response_length int32 [B]; logprobs float32 [B, N], of the response's tokens
    under the sampling temperature, 0 past the end; ended bool [B]: a stop token was sampled (it is in the response); versions
    int32 [B, N]: the number of updates that the weights had when they wrote each token, or None where it is not recorded.
    """

    tokens: Any
    prompt_length: Any
    response_length: Any
    logprobs: Any
    ended: Any
    versions: Any = None

    def part(self, begin: int, count: int) -> Rollout:
        """Rows [begin, begin + count)."""
        return jax.tree.map(lambda x: x[begin : begin + count], self)


@_array_record
class Experience:
    """A rollout with all that RL learns from. weight is float32 [B]: 0 for a row that does not count (its score was dropped,
    or it fills up the batch); everything else is float32 [B, N], zero past the response. importance weighs the
    policy's loss."""

    rollout: Rollout
    weight: Any
    reference_logprobs: Any
    values: Any
    rewards: Any
    advantages: Any
    returns: Any
    importance: Any


@_array_record
class AnswerRows:
    """Rows in which answered prompts stand side by side, and where the answers are found. R rows of T tokens; M: most answer
    tokens of a row.

    tokens, segment_ids (0 is padding) and positions int32 [R, T], the last two None where each row is one sequence; heads int32
    [R, M]: where in its row the token before each answer token stands, answer after answer. start and first int32 [B]: a
    sequence's first token among all R * T, and its first entry among all R * M of heads. used int32 []: the most entries of
    heads that a row has; None: M.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    heads: Any
    start: Any
    first: Any
    used: Any = None


@_array_record
class PackedParts:
    """The rows of B sequences in parts of one shape, for programs that take one part after another.

    rows: `AnswerRows` whose first four fields are [K, R, ...] and used is [K], and whose start and first are those in a
    sequence's own part.
    part int32 [B]: which part that is, -1 for a sequence that is in none. count int32 []: how many of the K are in use, at
    least 1. Plans of several minibatches have one more leading axis everywhere.
    """

    rows: AnswerRows
    part: Any
    count: Any


@_array_record
class AnswerPairs:
    """Pairs of answered prompts for direct preference optimisation; the first answer is the better one, as far as known.

    tokens int32 [B, 2, T]: prompt, answer, padding; prompt_length and length (of both together) int32 [B, 2];
    label float32 [B] = P(first is better); weight float32 [B] (0 = not counted); reference float32 [B, 2]: the
    log-probability of each answer under the reference.
    """

    tokens: Any
    prompt_length: Any
    length: Any
    label: Any
    weight: Any
    reference: Any


@_array_record
class ScoredPairs:
    """Pairs of complete sequences with the scores that a student is to give them.

    tokens int32 [B, 2, T], length int32 [B, 2], target float32 [B, 2]: the teacher's normalised scores.
    """

    tokens: Any
    length: Any
    target: Any


@_array_record
class PairBatch:
    """Pairs of complete sequences for the preference model.

    tokens int32 [B, 2, T], length int32 [B, 2], label float32 [B] = P(first is better), weight float32 [B] (0 = padding row),
    margin float32 [B], how far apart the scores are to be, or None for none.
    """

    tokens: Any
    length: Any
    label: Any
    weight: Any
    margin: Any = None
