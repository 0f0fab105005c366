"""Operations that batches need, counted on the host from their lengths: `models.flops` of records of numpy arrays."""

from __future__ import annotations

import numpy as np

from jaxalign.models import flops
from jaxalign.models.model import Model
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, Rollout, ScoredPairs
from jaxalign.training.packed import shared


def sampled(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(new tokens, operations) of sampling a rollout."""
    return int(np.sum(rollout.response_length)), _read(model, rollout)


def logprobs(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(tokens, operations) of the responses' log-probabilities."""
    return int(np.sum(_lengths(rollout))), _read(model, rollout)


def _lengths(rollout: Rollout) -> np.ndarray:
    return rollout.prompt_length + rollout.response_length


def _read(model: Model, rollout: Rollout) -> float:
    return flops.forward(model, _lengths(rollout), int(np.sum(rollout.response_length)))


def learning_packed(model: Model, batch: PackedBatch) -> float:
    """Operations of an update on packed documents, with the LM head at the tokens that are predicted."""
    rows, row = batch.segment_ids, np.arange(len(batch.segment_ids))[:, None]
    documents = (row * (int(rows.max(initial=0)) + 1) + rows)[rows > 0]
    return flops.learning(model, np.unique(documents, return_counts=True)[1], int(np.count_nonzero(batch.loss_mask[:, 1:])))


def learning_pairs(model: Model, pairs: AnswerPairs | PairBatch | ScoredPairs) -> float:
    """Operations of an update on both sequences of pairs, with the LM head at the answers where they are answers; what both of
    a pair begin with counts once."""
    return _pairs(flops.learning, model, pairs)


def reading_pairs(model: Model, pairs: AnswerPairs | PairBatch) -> float:
    """The same of a forward pass."""
    return _pairs(flops.forward, model, pairs)


def _pairs(operations, model: Model, pairs) -> float:
    heads = int(np.sum(pairs.length - pairs.prompt_length)) if isinstance(pairs, AnswerPairs) else 0
    return operations(model, pairs.length.reshape(-1), heads) - operations(model, shared(pairs.tokens, pairs.length))
