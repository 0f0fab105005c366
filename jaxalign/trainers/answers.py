"""Encodes pairs of answers and judged answers as arrays for the direct objectives, and measures a policy on them: the
log-probabilities of answers, the objective, and the accuracy of the reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import DPOConfig
from jaxalign.data.chat import styles
from jaxalign.data.loader import RowsOnDemand, take
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import concatenated
from jaxalign.errors import UserError
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import AnswerPairs, Comparison, Judgement, PackedParts, PairBatch, Prompt, Rollout
from jaxalign.registry.objectives import objectives_of
from jaxalign.steps.arguments import LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs, sorts_the_batch
from jaxalign.steps.early_stopping import LOSS
from jaxalign.steps.objectives import DirectInputs, anchors, objective_loss
from jaxalign.steps.packed import pack_pairs
from jaxalign.trainers.extent import refuse_equal, warn_of_cut

BUCKET = 32
"""Sequences are padded to a multiple of this many tokens."""

Pairs = TypeVar("Pairs", AnswerPairs, PairBatch)

AnsweredIds = tuple[list[int], list[int]]
"""The token ids of a prompt and of an answer to it."""


def oriented(pair: Comparison) -> Comparison:
    """The pair, swapped if needed so that the answer that the label prefers comes first."""
    if pair.label >= 0.5:
        return pair
    return dataclasses.replace(pair, response_a=pair.response_b, response_b=pair.response_a, label=1 - pair.label)


class EncodedAnswers(NamedTuple):
    """The encoded row of the data: a pair, or a judged answer.

    Attributes:
      sides: the answers with their prompts: two, the preferred one first, or a judged one.
      label: the probability that the first answer is better; of a judged answer, 1 for a good one.
      weight: the weight of the row's loss.
    """

    sides: tuple[AnsweredIds, ...]
    label: float
    weight: float


def encode_pair(tokenizer: Tokenizer, pair: Comparison, style: str) -> EncodedAnswers:
    """A pair with the answer first that the label prefers."""
    pair = oriented(pair)
    prompt = _prompt_ids(tokenizer, pair.prompt, style)
    sides = (styles.encode_answer(tokenizer, text, style) for text in (pair.response_a, pair.response_b))
    return EncodedAnswers(tuple((prompt, side) for side in sides), pair.label, pair.weight)


def encode_judged(tokenizer: Tokenizer, judgement: Judgement, style: str) -> EncodedAnswers:
    """A judged answer."""
    answer = styles.encode_answer(tokenizer, judgement.response, style)
    return EncodedAnswers(((_prompt_ids(tokenizer, judgement.prompt, style), answer),), float(judgement.desirable), 1.0)


def pair_arrays(
    tokenizer: Tokenizer, pairs: Sequence[Comparison], style: str, section: DPOConfig, single: bool = False
) -> AnswerPairs:
    """All pairs as numpy arrays, padded to one length; the reference's log-probabilities are 0.

    Args:
      single: for an objective on single answers. Each pair then makes two rows, one for each answer. A row has the answer,
        whose label is the probability that it is the better one, and then an answer to another prompt.
    """
    return _checked_arrays([encode_pair(tokenizer, pair, style) for pair in pairs], section.max_length, single)


def judged_arrays(
    tokenizer: Tokenizer, judgements: Sequence[Judgement], style: str, section: DPOConfig, single: bool = False
) -> AnswerPairs:
    """All judged answers as numpy arrays, one per row, the judged answer first; the label is 1 for a good answer.

    Args:
      single: for an objective on single answers. The second answer of a row is then an answer to another prompt; otherwise it
        is the judged answer again.
    """
    return _checked_arrays([encode_judged(tokenizer, one, style) for one in judgements], section.max_length, single)


@dataclasses.dataclass(frozen=True)
class AnswerPairBuilder:
    """Builds `AnswerPairs` from the `EncodedAnswers` of a window (`data.windows.ArrayBuilder`).

    Attributes:
      max_length: the maximum length of a prompt with its answer, in tokens, and the length of the arrays of a batch.
      single: as in `pair_arrays`.
    """

    max_length: int
    single: bool
    kind = AnswerPairs

    def fault(self, document: EncodedAnswers) -> str | None:
        """A pair is dropped if its answers differ only in tokens that are cut."""
        if self.single or len(document.sides) == 1:
            return None
        (_, first), (_, second) = document.sides
        most = self.max_length - 1
        return "equal_when_cut" if max(len(first), len(second)) > most and first[:most] == second[:most] else None

    def build(self, documents: Sequence[EncodedAnswers]) -> tuple[AnswerPairs, int]:
        """No rows for an objective on single answers, if all answers are to one prompt."""
        if self.single and len({tuple(prompt) for one in documents for prompt, _ in one.sides}) == 1:
            documents = []
        pairs = _padded(*_rows_of(documents, self.single), self.max_length)
        return dataclasses.replace(pairs, cut=0), pairs.cut

    def join(self, parts: Sequence[AnswerPairs]) -> AnswerPairs:
        return concatenated([widened(part, self.max_length) for part in parts])


def widened(pairs: Pairs, length: int) -> Pairs:
    """The pairs with tokens that are padded to a length."""
    padding = ((0, 0), (0, 0), (0, length - pairs.tokens.shape[2]))
    return dataclasses.replace(pairs, tokens=np.pad(pairs.tokens, padding))


def packed(
    section: DPOConfig, model: Model, pairs: AnswerPairs | RowsOnDemand, index: np.ndarray
) -> tuple[AnswerPairs, PackedParts]:
    """(the pairs `index` on the devices, without their tokens; the tokens packed into micro-batches)."""
    own = take(pairs, index)
    branches = reads_branches(model.config, model.sharding)
    parts = pack_pairs(own, section.micro_batch_tokens, model.sharding, sorts_the_batch(section), branches)
    return place_rows(model.sharding, dataclasses.replace(own, tokens=None, cut=0)), parts


def answer_pairs(rollout: Rollout, labelled: Sequence[Comparison], undecided: str) -> AnswerPairs:
    """Pairs from a rollout (numpy): rows 2i and 2i + 1 form pair i, with the preferred answer first. The reference is 0.

    Pairs of equal answers have weight 0, as do undecided pairs if `undecided` is "drop".
    """
    B = len(labelled)
    length = rollout.prompt_length + rollout.response_length
    label = np.asarray([c.label for c in labelled], np.float32)
    order = np.stack([2 * np.arange(B) + (label < 0.5), 2 * np.arange(B) + (label >= 0.5)], axis=1)
    counted = [c.response_a != c.response_b and (c.decided or undecided == "half") for c in labelled]
    return AnswerPairs(
        tokens=rollout.tokens[order],
        prompt_length=rollout.prompt_length[order],
        length=length[order],
        label=np.maximum(label, 1 - label),
        weight=np.asarray(counted, np.float32),
        reference=np.zeros((B, 2), np.float32),
    )


def all_logprobs(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> np.ndarray:
    """float32 [B, 2]: the log-probability of every answer."""
    out, batch = [], section.batch
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        own, parts = packed(section, model, pairs, index)
        arguments = LogprobArguments(model=model, params=params, pairs=own, packed=parts)
        out.append(fetch(answer_logprobs(arguments).logprobs))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)


def held_out_metrics(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict[str, float]:
    """held_out_loss and held_out_accuracy: the means of the objective's loss and accuracy over the rows, by their weights.

    An objective with an anchor computes it over all rows.
    """
    columns = *all_logprobs(section, model, params, pairs).T, *pairs.reference.T, *(pairs.length - pairs.prompt_length).T
    inputs = DirectInputs(*(np.asarray(x, np.float32) for x in columns), pairs.label, pairs.weight, np.float32(0), section)
    loss, reported = objective_loss(inputs, anchors(inputs))
    means = (float(np.average(np.asarray(x, np.float64), weights=pairs.weight)) for x in (loss, reported["accuracy"]))
    return dict(zip((LOSS, "held_out_accuracy"), means, strict=True))


def accuracy(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict | None:
    """How often the implicit reward prefers the answer that the label prefers; None if no label prefers one.

    The implicit reward is the log-probability minus the reference's, per token for objectives with mean rewards.
    """
    leaning = pairs.label > 0.5
    if not leaning.any():
        return None
    reward = all_logprobs(section, model, params, pairs) - pairs.reference
    objectives = objectives_of(section.objective)
    if len(objectives) == 1 and objectives[0].mean_rewards:
        reward = reward / (pairs.length - pairs.prompt_length)
    reward = reward[leaning]
    right, total = int(np.sum(reward[:, 0] > reward[:, 1])), len(reward)
    low, high = wilson_interval(right, total)
    margin = float(np.mean(reward[:, 0] - reward[:, 1]) * section.beta)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high, "margin": margin}


def separation(section: DPOConfig, model: Model, params: Params, judged: AnswerPairs) -> dict | None:
    """Over all pairs of a good and a bad answer: how often the good one has the higher implicit reward (ties count one half),
    and the mean difference. None unless there are answers of both kinds."""
    good = judged.label > 0.5
    if not good.any() or good.all():
        return None
    reward = (all_logprobs(section, model, params, judged) - judged.reference)[:, 0]
    bad = np.sort(reward[~good])
    below = (np.searchsorted(bad, reward[good], "left") + np.searchsorted(bad, reward[good], "right")) / 2
    margin = float((np.mean(reward[good]) - np.mean(bad)) * section.beta)
    counts = {"desirable": int(good.sum()), "undesirable": len(bad)}
    return counts | {"accuracy": float(np.mean(below) / len(bad)), "margin": margin}


def _prompt_ids(tokenizer: Tokenizer, prompt: Prompt, style: str) -> list[int]:
    with styles.naming(prompt.id):
        return styles.encode_prompt(tokenizer, prompt.messages, style)


def _mismatched(singles: Sequence[AnsweredIds], i: int) -> list[int]:
    """The next answer to a prompt other than row i's. Raises UserError if all answers are to one prompt."""
    prompt = singles[i][0]
    for step in range(1, len(singles)):
        other, answer = singles[(i + step) % len(singles)]
        if other != prompt:
            return answer
    raise UserError("all answers are to one prompt, but kto needs answers to several prompts for its KL; give more prompts, or "
                    "choose another dpo.objective")


def _rows_of(encoded: Sequence[EncodedAnswers], single: bool) -> tuple[list[Sequence[AnsweredIds]], list[float], list[float]]:
    """(the two answers of each row, the labels, the weights)."""
    if not single:
        rows = [one.sides if len(one.sides) == 2 else one.sides * 2 for one in encoded]
        return rows, [one.label for one in encoded], [one.weight for one in encoded]
    singles = [side for one in encoded for side in one.sides]
    rows = [((prompt, answer), (prompt, _mismatched(singles, i))) for i, (prompt, answer) in enumerate(singles)]
    labels = [label for one in encoded for label in (one.label, 1 - one.label)[: len(one.sides)]]
    return rows, labels, [one.weight for one in encoded for _ in one.sides]


def _checked_arrays(encoded: Sequence[EncodedAnswers], max_length: int, single: bool) -> AnswerPairs:
    """The arrays of all rows. Warns of rows that are cut. Raises UserError if answers differ only in tokens that are cut."""
    rows, labels, weights = _rows_of(encoded, single)
    pairs = _padded(rows, labels, weights, max_length)
    whole = [tuple(answer for _, answer in row) for row in rows]
    most = pairs.tokens.shape[2] - 1
    refuse_equal(whole, [tuple(answer[:most] for answer in sides) for sides in whole], max_length)
    warn_of_cut("pairs", pairs.cut, 2 * len(rows), "prompts with an answer", "max_length", max_length)
    return pairs


def _padded(
    rows: Sequence[Sequence[AnsweredIds]], labels: Sequence[float], weights: Sequence[float], max_length: int
) -> AnswerPairs:
    """Pairs of sequences as arrays. Prompts that are too long lose their oldest tokens; answers lose their last tokens."""
    longest = max((len(prompt) + len(answer) for row in rows for prompt, answer in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    shape = (len(rows), 2)
    tokens = np.zeros((*shape, width), np.int32)
    prompt_length, length = np.ones(shape, np.int32), np.ones(shape, np.int32)
    cut = sum(len(prompt) + len(answer) > width for row in rows for prompt, answer in row)
    for i, row in enumerate(rows):
        for side, (prompt, answer) in enumerate(row):
            answer = answer[: width - 1]
            prompt = prompt[-(width - len(answer)) :]
            ids = [*prompt, *answer]
            tokens[i, side, : len(ids)], prompt_length[i, side], length[i, side] = ids, len(prompt), len(ids)
    label, weight = np.asarray(labels, np.float32), np.asarray(weights, np.float32)
    return AnswerPairs(tokens, prompt_length, length, label, weight, np.zeros(shape, np.float32), cut)
