"""Counts the FLOPs of batches on the host from sequence lengths: `models.flops` for records of numpy arrays."""

from __future__ import annotations

import numpy as np

from jaxalign.models import flops
from jaxalign.models.model import Model
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, Rollout, ScoredPairs
from jaxalign.steps.packed import shared


def sampled(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(new tokens, FLOPs) for sampling a rollout."""
    new_tokens = int(np.sum(rollout.response_length))
    return new_tokens, flops.forward(model, rollout.prompt_length + rollout.response_length, new_tokens)


def logprobs(model: Model, rollout: Rollout) -> tuple[int, float]:
    """(tokens, FLOPs) for computing the responses' log-probabilities."""
    tokens = int(np.sum(rollout.prompt_length + rollout.response_length))
    return tokens, sampled(model, rollout)[1]


def learning_packed(model: Model, batch: PackedBatch) -> float:
    """FLOPs of an update on packed documents, with the LM head at the predicted tokens."""
    rows, row = batch.segment_ids, np.arange(len(batch.segment_ids))[:, None]
    documents = (row * (int(rows.max(initial=0)) + 1) + rows)[rows > 0]
    return flops.learning(model, np.unique(documents, return_counts=True)[1], int(np.count_nonzero(batch.loss_mask[:, 1:])))


def learning_pairs(model: Model, pairs: AnswerPairs | PairBatch | ScoredPairs, operations=flops.learning) -> float:
    """FLOPs of an update on both sequences of each pair, with the LM head at answer tokens; a shared prefix counts once.

    operations: `flops.learning`, or `flops.forward` for those of a forward pass.
    """
    heads = int(np.sum(pairs.length - pairs.prompt_length)) if isinstance(pairs, AnswerPairs) else 0
    return operations(model, pairs.length.reshape(-1), heads) - operations(model, shared(pairs.tokens, pairs.length))


def reading_pairs(model: Model, pairs: AnswerPairs | PairBatch) -> float:
    """FLOPs of a forward pass on both sequences of each pair; a shared prefix counts once."""
    return learning_pairs(model, pairs, flops.forward)
