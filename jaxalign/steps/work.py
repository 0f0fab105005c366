"""Counts the FLOPs of batches on the host from sequence lengths: `models.flops` for records of numpy arrays."""

from __future__ import annotations

import numpy as np

from jaxalign.models import flops
from jaxalign.models.model import Model
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, Rollout, ScoredPairs
from jaxalign.steps.packed import shared


def sampled(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(new tokens, FLOPs) for sampling a rollout."""
    return int(np.sum(rollout.response_length)), _read(model, rollout)


def logprobs(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(tokens, FLOPs) for computing the responses' log-probabilities."""
    return int(np.sum(_lengths(rollout))), _read(model, rollout)


def _lengths(rollout: Rollout) -> np.ndarray:
    return rollout.prompt_length + rollout.response_length


def _read(model: Model, rollout: Rollout) -> float:
    return flops.forward(model, _lengths(rollout), int(np.sum(rollout.response_length)))


def learning_packed(model: Model, batch: PackedBatch) -> float:
    """FLOPs of an update on packed documents, with the LM head at the predicted tokens."""
    rows, row = batch.segment_ids, np.arange(len(batch.segment_ids))[:, None]
    documents = (row * (int(rows.max(initial=0)) + 1) + rows)[rows > 0]
    return flops.learning(model, np.unique(documents, return_counts=True)[1], int(np.count_nonzero(batch.loss_mask[:, 1:])))


def learning_pairs(model: Model, pairs: AnswerPairs | PairBatch | ScoredPairs) -> float:
    """FLOPs of an update on both sequences of each pair, with the LM head at answer tokens; a shared prefix counts once."""
    return _pairs(flops.learning, model, pairs)


def reading_pairs(model: Model, pairs: AnswerPairs | PairBatch) -> float:
    """FLOPs of a forward pass on both sequences of each pair; a shared prefix counts once."""
    return _pairs(flops.forward, model, pairs)


def _pairs(operations, model: Model, pairs) -> float:
    heads = int(np.sum(pairs.length - pairs.prompt_length)) if isinstance(pairs, AnswerPairs) else 0
    return operations(model, pairs.length.reshape(-1), heads) - operations(model, shared(pairs.tokens, pairs.length))
