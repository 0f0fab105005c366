"""Packs prompts and responses into arrays of few different shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.records import Rollout
from jaxalign.rollout.responses import Response, refuse
from jaxalign.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Padding:
    """The shape of a rollout's arrays.

    Attributes:
      batch: the number of rows is a multiple of this.
      max_length: the maximum length of prompt plus response, in tokens.
      bucket: prompts are padded to a multiple of this many tokens.
      vocab: the vocabulary size; token ids are below it.
    """

    batch: int
    max_length: int
    bucket: int
    vocab: int

    def prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts as int32 [B, P], and their lengths as int32 [B]. Rows without a prompt have length 0.

        Raises:
          UserError: a prompt is empty, does not fit, or has ids outside the vocabulary.
        """
        self.check(prompts, max_new_tokens)
        B, P = -(-len(prompts) // self.batch) * self.batch, self.length(prompts, max_new_tokens)
        tokens, length = np.zeros((B, P), np.int32), np.zeros(B, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)], length[i] = prompt, len(prompt)
        return tokens, length

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raises UserError if a prompt is empty, does not fit, or has ids outside the vocabulary."""
        for prompt in prompts:
            refusal = refuse(prompt, max_new_tokens, self.max_length, self.vocab)
            if refusal is not None:
                raise UserError(refusal)

    def length(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        """The length to which these prompts are padded."""
        longest = max(map(len, prompts), default=1)
        return max(0, min(self.max_length - max_new_tokens, -(-longest // self.bucket) * self.bucket))

    def rollout(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Response], rows: Sequence[int], sampling: Sampling
    ) -> Rollout:
        """Prompts and their responses as a `Rollout` of numpy arrays, including versions.

        Raises:
          UserError: a prompt does not fit, or a response has an error.
        """
        N = sampling.max_new_tokens
        tokens, length = self.prompts(prompts, N)
        for response, row in zip(responses, rows, strict=True):
            if response.error:
                raise UserError(f"sampling of row {row}: {response.error}")
        B = len(tokens)
        tokens = np.pad(tokens, ((0, 0), (0, N)))
        count, ended = np.zeros(B, np.int32), np.zeros(B, bool)
        logprobs, versions = np.zeros((B, N), np.float32), np.zeros((B, N), np.int32)
        for i, response in enumerate(responses):
            count[i], ended[i] = len(response.ids), response.ended
            tokens[i, length[i] : length[i] + count[i]] = response.ids
            logprobs[i, : count[i]] = response.logprobs
            versions[i, : count[i]] = response.versions
        return Rollout(tokens, length, count, logprobs, ended, versions)
