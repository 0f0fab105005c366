"""Encodes pairs of complete sequences as arrays, and scores them with a reward model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxalign.data.chat import styles
from jaxalign.data.loader import RowsOnDemand, take
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.data.windows import concatenated
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Comparison, PackedParts, PairBatch
from jaxalign.rewards.scorer import PairScoreArguments, Scorer, raw_pair_scores
from jaxalign.steps.packed import pack_pairs
from jaxalign.trainers.answers import BUCKET, widened
from jaxalign.trainers.extent import refuse_equal, warn_of_cut


def pair_arrays(
    tokenizer: Tokenizer, pairs: Sequence[Comparison], style: str, max_length: int, margin_weight: float = 0.0
) -> PairBatch:
    """All pairs as one PairBatch of numpy arrays, padded to one length.

    Args:
      max_length: the maximum length of a sequence, in tokens; a longer sequence loses its oldest tokens.
      margin_weight: multiplies the pairs' margins; 0 leaves margins out.

    Raises:
      UserError: a pair's sequences differ only in tokens that are cut, or the style refuses a dialogue.
    """
    encoded = [encode_pair(tokenizer, pair, style) for pair in pairs]
    wholes = [one.sides for one in encoded]
    refuse_equal(wholes, [tuple(ids[-max_length:] for ids in whole) for whole in wholes], max_length)
    arrays = _padded(encoded, max_length, margin_weight)
    warn_of_cut("pairs", arrays.cut, 2 * len(encoded), "prompts with an answer", "max_length", max_length)
    return arrays


class EncodedPair(NamedTuple):
    """An encoded pair: the token ids of both sequences, its label, weight and margin."""

    sides: tuple[list[int], list[int]]
    label: float
    weight: float
    margin: float


def encode_pair(tokenizer: Tokenizer, pair: Comparison, style: str) -> EncodedPair:
    """A pair with its sequences encoded. Raises UserError if the style refuses the dialogue."""
    with styles.naming(pair.prompt.id):
        first, second = (
            styles.encode_completion(tokenizer, pair.prompt.messages, side, style)[0]
            for side in (pair.response_a, pair.response_b)
        )
    return EncodedPair((first, second), pair.label, pair.weight, pair.margin or 0.0)


@dataclasses.dataclass(frozen=True)
class PairBuilder:
    """Builds a `PairBatch` from the `EncodedPair`s of a window (`data.windows.ArrayBuilder`).

    Attributes:
      max_length: the maximum length of a sequence, in tokens, and the length of the arrays of a batch.
      margin_weight: as in `pair_arrays`.
    """

    max_length: int
    margin_weight: float = 0.0
    kind = PairBatch

    def fault(self, document: EncodedPair) -> str | None:
        """A pair is dropped if its sequences differ only in tokens that are cut."""
        first, second = document.sides
        most = self.max_length
        return "equal_when_cut" if max(len(first), len(second)) > most and first[-most:] == second[-most:] else None

    def build(self, documents: Sequence[EncodedPair]) -> tuple[PairBatch, int]:
        pairs = _padded(documents, self.max_length, self.margin_weight)
        return dataclasses.replace(pairs, cut=0), pairs.cut

    def join(self, parts: Sequence[PairBatch]) -> PairBatch:
        return concatenated([widened(part, self.max_length) for part in parts])


def _padded(encoded: Sequence[EncodedPair], max_length: int, margin_weight: float) -> PairBatch:
    """Pairs as arrays. Sequences that are too long lose their oldest tokens."""
    rows = [[ids[-max_length:] for ids in one.sides] for one in encoded]
    cut = sum(len(ids) > max_length for one in encoded for ids in one.sides)
    longest = max((len(ids) for row in rows for ids in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    tokens, length = np.zeros((len(rows), 2, width), np.int32), np.ones((len(rows), 2), np.int32)
    for i, row in enumerate(rows):
        for side, ids in enumerate(row):
            tokens[i, side, : len(ids)], length[i, side] = ids, len(ids)
    label = np.asarray([one.label for one in encoded], np.float32)
    margin = np.asarray([margin_weight * one.margin for one in encoded], np.float32) if margin_weight else None
    weight = np.asarray([one.weight for one in encoded], np.float32)
    return PairBatch(tokens, length, label, weight, margin, cut)


def packed(
    model: Model, pairs: PairBatch | RowsOnDemand, index: np.ndarray, tokens: int = 0
) -> tuple[PairBatch, PackedParts]:
    """(the pairs `index` on the devices, without their tokens; the tokens packed into micro-batches).

    Args:
      tokens: the maximum number of tokens per device in a micro-batch; 0 chooses automatically.
    """
    own = take(pairs, index)
    parts = pack_pairs(own, tokens, model.sharding, branches=reads_branches(model.config, model.sharding))
    return place_rows(model.sharding, dataclasses.replace(own, tokens=None, cut=0)), parts


def all_scores(scorer: Scorer, params: Params, pairs: PairBatch, batch: int) -> np.ndarray:
    """float32 [B, 2]: the raw scores of every pair."""
    out = []
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        own, parts = packed(scorer.model, pairs, index)
        arguments = PairScoreArguments(scorer=scorer, params=params, pairs=own, packed=parts)
        out.append(fetch(raw_pair_scores(arguments)))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)
