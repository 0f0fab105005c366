"""Experience for updates of RL without sampling and scoring."""

from __future__ import annotations

import numpy as np

from jaxalign.records import Experience, Rollout
from tests import tiny

PROMPT, RESPONSE = 8, 8  # the maximum numbers of tokens


def made_experience(seed: int = 0) -> Experience:
    """8 rows of random tokens. The log-probs are near those of fresh parameters, so that some ratios are clipped and some not.
    One row does not count."""
    rng = np.random.default_rng(seed)
    prompt, length = np.array([3, 2, 7, 1, 8, 5, 4, 3], np.int32), np.array([8, 5, 1, 8, 3, 6, 8, 2], np.int32)
    written = np.arange(RESPONSE) < length[:, None]
    filled = np.arange(PROMPT + RESPONSE) < (prompt + length)[:, None]

    def numbers(mean: float, spread: float) -> np.ndarray:
        return np.where(written, rng.normal(mean, spread, written.shape), 0).astype(np.float32)

    tokens = np.where(filled, rng.integers(0, tiny.DECODER.vocab, filled.shape), 0).astype(np.int32)
    logprobs, values, advantages = numbers(-np.log(tiny.DECODER.vocab), 0.2), numbers(0, 0.3), numbers(0, 1)
    return Experience(
        rollout=Rollout(tokens, prompt, length, logprobs, length < RESPONSE),
        weight=np.array([1, 1, 1, 1, 1, 0, 1, 1], np.float32), reference_logprobs=logprobs + numbers(0, 0.1), values=values,
        rewards=numbers(0, 0.5), advantages=advantages, returns=values + advantages, importance=written.astype(np.float32),
    )
