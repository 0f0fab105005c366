"""Encodes pairs of complete sequences as arrays, and scores them with a reward model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.attention.dispatch import reads_branches
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Comparison, PackedParts, PairBatch
from jaxalign.rewards.scorer import PairScoreArguments, Scorer, raw_pair_scores
from jaxalign.steps.packed import pack_pairs
from jaxalign.trainers.lengths import refuse_equal, warn_of_cut

BUCKET = 32
"""Sequences are padded to a multiple of this many tokens."""


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
    wholes = []
    for pair in pairs:
        sides = (pair.response_a, pair.response_b)
        with styles.naming(pair.prompt.id):
            wholes.append([styles.encode_completion(tokenizer, pair.prompt.messages, side, style)[0] for side in sides])
    rows = [[ids[-max_length:] for ids in whole] for whole in wholes]
    refuse_equal(wholes, rows, max_length)
    cut = sum(len(ids) > max_length for whole in wholes for ids in whole)
    warn_of_cut("pairs", cut, 2 * len(rows), "prompts with an answer", "max_length", max_length)
    longest = max((len(ids) for row in rows for ids in row), default=1)
    width = min(max_length, -(-longest // BUCKET) * BUCKET)
    tokens, length = np.zeros((len(rows), 2, width), np.int32), np.ones((len(rows), 2), np.int32)
    for i, row in enumerate(rows):
        for side, ids in enumerate(row):
            tokens[i, side, : len(ids)], length[i, side] = ids, len(ids)
    label = np.asarray([pair.label for pair in pairs], np.float32)
    margin = np.asarray([margin_weight * (pair.margin or 0.0) for pair in pairs], np.float32) if margin_weight else None
    weight = np.asarray([pair.weight for pair in pairs], np.float32)
    return PairBatch(tokens, length, label, weight, margin, cut)


def packed(model: Model, pairs: PairBatch, index: np.ndarray, tokens: int = 0) -> tuple[PairBatch, PackedParts]:
    """(the pairs `index` on the devices, without their tokens; the tokens packed into micro-batches).

    Args:
      tokens: the maximum number of tokens per device in a micro-batch; 0 chooses automatically.
    """
    own = jax.tree.map(lambda x: x[index], pairs)
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
