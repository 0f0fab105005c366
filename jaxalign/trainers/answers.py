"""Encodes pairs of answers and judged answers as arrays for the direct objectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.config import DPOConfig
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model
from jaxalign.parallel.rows import place_rows
from jaxalign.records import AnswerPairs, Comparison, Judgement, PackedParts, Prompt, Rollout
from jaxalign.steps.direct_step import sorts_the_batch
from jaxalign.steps.packed import pack_pairs
from jaxalign.trainers.lengths import refuse_equal, warn_of_cut

BUCKET = 32
"""Sequences are padded to a multiple of this many tokens."""

AnsweredIds = tuple[list[int], list[int]]
"""The token ids of a prompt and of an answer to it."""


def oriented(pair: Comparison) -> Comparison:
    """The pair, swapped if needed so that the answer that the label prefers comes first."""
    if pair.label >= 0.5:
        return pair
    return dataclasses.replace(pair, response_a=pair.response_b, response_b=pair.response_a, label=1 - pair.label)


def pair_arrays(
    tokenizer: Tokenizer, pairs: Sequence[Comparison], style: str, section: DPOConfig, single: bool = False
) -> AnswerPairs:
    """All pairs as numpy arrays, padded to one length; the reference's log-probabilities are 0.

    Args:
      single: for an objective on single answers. Each pair then makes two rows, one for each answer. A row has the answer,
        whose label is the probability that it is the better one, and then an answer to another prompt.
    """
    rows, labels, weights = [], [], []
    for pair in map(oriented, pairs):
        prompt = _prompt_ids(tokenizer, pair.prompt, style)
        answers = [styles.encode_answer(tokenizer, text, style) for text in (pair.response_a, pair.response_b)]
        rows.append([(prompt, answer) for answer in answers])
        labels.append(pair.label)
        weights.append(pair.weight)
    if single:
        singles = [side for row in rows for side in row]
        rows = [[(prompt, answer), (prompt, _mismatched(singles, i))] for i, (prompt, answer) in enumerate(singles)]
        labels = [side for label in labels for side in (label, 1 - label)]
        weights = [weight for weight in weights for _ in range(2)]
    return _padded(rows, labels, weights, section.max_length)


def judged_arrays(
    tokenizer: Tokenizer, judgements: Sequence[Judgement], style: str, section: DPOConfig, single: bool = False
) -> AnswerPairs:
    """All judged answers as numpy arrays, one per row, the judged answer first; the label is 1 for a good answer.

    Args:
      single: for an objective on single answers. The second answer of a row is then an answer to another prompt; otherwise it
        is the judged answer again.
    """
    singles = [
        (_prompt_ids(tokenizer, one.prompt, style), styles.encode_answer(tokenizer, one.response, style))
        for one in judgements
    ]
    second = [_mismatched(singles, i) if single else answer for i, (_, answer) in enumerate(singles)]
    rows = [[(prompt, answer), (prompt, other)] for (prompt, answer), other in zip(singles, second, strict=True)]
    labels = [float(one.desirable) for one in judgements]
    return _padded(rows, labels, [1.0] * len(rows), section.max_length)


def packed(section: DPOConfig, model: Model, pairs: AnswerPairs, index: np.ndarray) -> tuple[AnswerPairs, PackedParts]:
    """(the pairs `index` on the devices, without their tokens; the tokens packed into micro-batches)."""
    own = jax.tree.map(lambda x: x[index], pairs)
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


def _padded(
    rows: Sequence[Sequence[AnsweredIds]], labels: Sequence[float], weights: Sequence[float], max_length: int
) -> AnswerPairs:
    """Pairs of sequences as arrays. Prompts that are too long lose their oldest tokens; answers lose their last tokens."""
    longest = max((len(prompt) + len(answer) for row in rows for prompt, answer in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    shape = (len(rows), 2)
    tokens = np.zeros((*shape, width), np.int32)
    prompt_length, length = np.ones(shape, np.int32), np.ones(shape, np.int32)
    whole = [tuple(answer for _, answer in row) for row in rows]
    refuse_equal(whole, [tuple(answer[: width - 1] for answer in sides) for sides in whole], max_length)
    cut = sum(len(prompt) + len(answer) > width for row in rows for prompt, answer in row)
    warn_of_cut("pairs", cut, 2 * len(rows), "prompts with an answer", "max_length", max_length)
    for i, row in enumerate(rows):
        for side, (prompt, answer) in enumerate(row):
            answer = answer[: width - 1]
            prompt = prompt[-(width - len(answer)) :]
            ids = [*prompt, *answer]
            tokens[i, side, : len(ids)], prompt_length[i, side], length[i, side] = ids, len(prompt), len(ids)
    label, weight = np.asarray(labels, np.float32), np.asarray(weights, np.float32)
    return AnswerPairs(tokens, prompt_length, length, label, weight, np.zeros(shape, np.float32), cut)
