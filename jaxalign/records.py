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
    """One turn of a dialogue. `role` is "user", "assistant" or "system"."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A dialogue without the assistant's answer; its last message is the user's.

    `id` is unique and stable; `source` names the prompt set it came from ("red_team", "helpful", ...). `columns` are JSON
    values that belong to it, such as a reference answer: rewards read them, models do not.
    """

    id: str
    messages: tuple[Message, ...]
    source: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class Principle:
    """One principle of a constitution, worded for critique, revision and comparison."""

    name: str
    critique_request: str
    revision_request: str
    comparison: str


@dataclasses.dataclass(frozen=True)
class Exemplar:
    """An example of critique and revision, shown to a judge before a request. `dialogue` ends with the user's message."""

    dialogue: tuple[Message, ...]
    response: str
    critique_request: str
    critique: str
    revision_request: str
    revision: str


@dataclasses.dataclass(frozen=True)
class Revision:
    """One round of critique and revision of one response; round 0 is a plain helpful sample (no critique).

    complete: whether the text to imitate, the revision or in round 0 the response, ended. outcome: why that text is not an
    ordinary one, a name in `reasons.REVISION`, else None. notes: names in `reasons.NOTES`. reasoning: the
    thoughts that preceded the text, if any.
    """

    prompt: Prompt
    round: int
    principle: str | None
    response: str
    critique: str | None
    revision: str | None
    complete: bool
    outcome: str | None = None
    notes: tuple[str, ...] = ()
    reasoning: str | None = None


@dataclasses.dataclass(frozen=True)
class PrincipleLabel:
    """A judge's verdicts on a pair of responses under one principle.

    ab: P(response_a is better) with response_a shown first; ba: the same with response_a shown second; None if there is no
    verdict, or if this order was not asked. tie: the probability that neither is better, averaged over the orders, if the judge
    may say so. reasoning_ab, reasoning_ba: the texts before the verdicts, if any. problem_ab, problem_ba: why an order that was
    asked has no verdict, a name in `reasons.PROBLEMS`.
    """

    principle: str
    ab: float | None = None
    ba: float | None = None
    tie: float | None = None
    reasoning_ab: str | None = None
    reasoning_ba: str | None = None
    problem_ab: str | None = None
    problem_ba: str | None = None

    @property
    def complete(self) -> bool:
        """Whether each order that was asked has a verdict."""
        return self.ab is not None and self.problem_ba is None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pair of responses with a soft label: the probability that `response_a` is the better one.

    labels: the verdicts under each principle. principle: the one that decided the label, if any. label_ab, label_ba:
    P(response_a is better) with response_a shown first and second, averaged over the principles that count. outcome: why the
    pair has no decided label, a name in `reasons.COMPARISON`, else None. margin: by how much the better one is better, if
    known. problem: why the judge gave no verdict, a name in `reasons.PROBLEMS`. outside: the probability that the judge gave to
    no option, averaged over its verdicts, if known. notes: what the judge did not see, names in `reasons.NOTES`.
    disagreement: of a jury, the largest difference between two members' labels. weight: the weight of the pair's loss, at least
    0. incomplete: the responses that did not end within the length limit, "a" and "b".
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
    problem: str | None = None
    outside: float | None = None
    notes: tuple[str, ...] = ()
    disagreement: float | None = None
    weight: float = 1.0
    labels: tuple[PrincipleLabel, ...] = ()
    principle: str | None = None
    outcome: str | None = None
    incomplete: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One response to imitate."""

    prompt: Prompt
    response: str


@dataclasses.dataclass(frozen=True)
class Judgement(Demonstration):
    """One response with a verdict: good (desirable) or bad."""

    desirable: bool


def _array_record(cls: type) -> type:
    cls = dataclasses.dataclass(frozen=True)(cls)
    jax.tree_util.register_dataclass(cls)
    return cls


@_array_record
class PackedBatch:
    """Rows of several documents, which segment ids distinguish (0 is padding). All arrays but the mask are int32 [B, T].

    loss_mask[b, t] (float32) is the loss weight of predicting tokens[b, t] from the preceding tokens of its segment.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    loss_mask: Any


@_array_record
class Rollout:
    """Sampled responses. Row b holds its prompt, immediately followed by its response, then padding.

    tokens int32 [B, T]; prompt_length and response_length int32 [B]; logprobs float32 [B, N], of the response's tokens
    under the sampling temperature, 0 past the end; ended bool [B]: a stop token or a stop text was sampled (it is in the
    response); versions int32 [B, N]: the number of updates applied to the weights that sampled each token, or None if not
    recorded.
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
    """A rollout with everything that an RL update needs.

    weight is float32 [B]: 0 for a row that does not count (its score was dropped, or it pads the batch). All other arrays are
    float32 [B, N], zero past the response. importance weights the policy loss per token.
    """

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
    """Answered prompts packed into R rows of T tokens, and the positions of their answers. M: the maximum number of answer
    tokens in a row.

    tokens, segment_ids (0 is padding) and positions int32 [R, T], the last two None if each row is one sequence; heads int32
    [R, M]: the position in its row of the token before each answer token, one answer after the other. start and first int32
    [B]: the index of a sequence's first token among all R * T, and of its first entry among all R * M of heads. used int32 []:
    the largest number of entries of heads that a row uses; None means M.
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
    """B sequences packed into K parts of the same shape, for programs that process one part after another.

    rows: `AnswerRows` whose first four fields are [K, R, ...] and whose used is [K]; start and first are relative to the
    sequence's part.
    part int32 [B]: the index of each sequence's part, -1 for a sequence in none. count int32 []: the number of parts in use,
    at least 1. Plans of several minibatches have one more leading axis in every field.
    """

    rows: AnswerRows
    part: Any
    count: Any


@_array_record
class AnswerPairs:
    """Pairs of answered prompts for direct preference optimisation; the first answer is the one labelled better.

    tokens int32 [B, 2, T]: prompt, answer, padding; prompt_length and length (of both together) int32 [B, 2];
    label float32 [B] = P(first is better); weight float32 [B] (0 = not counted); reference float32 [B, 2]: the
    log-probability of each answer under the reference; cut: the number of answered prompts that lost tokens.
    """

    tokens: Any
    prompt_length: Any
    length: Any
    label: Any
    weight: Any
    reference: Any
    cut: int = dataclasses.field(default=0, metadata={"static": True})


@_array_record
class ScoredPairs:
    """Pairs of complete sequences with the target scores for a student.

    tokens int32 [B, 2, T], length int32 [B, 2], target float32 [B, 2]: the teacher's normalised scores.
    """

    tokens: Any
    length: Any
    target: Any


@_array_record
class PairBatch:
    """Pairs of complete sequences for the preference model.

    tokens int32 [B, 2, T], length int32 [B, 2], label float32 [B] = P(first is better), weight float32 [B], the weight of
    the pair's loss (0 = padding row), margin float32 [B], the desired difference between the scores, or None for no margins;
    cut: the number of sequences that lost tokens.
    """

    tokens: Any
    length: Any
    label: Any
    weight: Any
    margin: Any = None
    cut: int = dataclasses.field(default=0, metadata={"static": True})
