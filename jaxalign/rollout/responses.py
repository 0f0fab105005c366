"""Responses, rows being decoded, the reasons why a prompt cannot be answered, and the arrays of prompts and responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxalign.errors import UserError
from jaxalign.records import Rollout
from jaxalign.rollout.sampling import Sampling

BROKEN = "the model's logits are not finite numbers"
"""The error of a row whose logits are not finite."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
      ids: its tokens, including the stop token or those that complete a stop text.
      ended: whether a stop token or a stop text ended it.
      logprob: the sum of `logprobs`.
      logprobs: the log-probability of each token at the sampling temperature.
      versions: the version of the weights that generated each token.
      error: why the response is missing or incomplete; None for a complete one.
      reused: the number of the prompt's first tokens whose keys and values were computed for another row.
      stop: the stop text that ended it; "" if none did.
    """

    ids: tuple[int, ...]
    ended: bool
    logprob: float
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    error: str | None = None
    reused: int = dataclasses.field(default=0, compare=False)
    stop: str = ""


@dataclasses.dataclass
class SampledRow:
    """A prompt and its response so far.

    Attributes:
      index: the number of prompts that the session received before.
      prompt: token ids.
      number: the global row number.
      sampling: the settings; settings int32 [F]: they and the key, as from `Sampling.packed`.
      pieces: the (tokens, log-probabilities, version) of each chunk.
      reused: see `Response`.
    """

    index: int
    prompt: tuple[int, ...]
    number: int
    sampling: Sampling
    settings: np.ndarray
    pieces: list[tuple[np.ndarray, np.ndarray, int]] = dataclasses.field(default_factory=list)
    reused: int = 0

    def reach(self, steps: int) -> int:
        """The number of slots for the prompt, without its last token, and at most `steps` new tokens."""
        return len(self.prompt) - 1 + min(self.sampling.max_new_tokens, steps)

    def response(self, error: str | None) -> Response:
        ids = np.concatenate([piece[0] for piece in self.pieces]) if self.pieces else np.zeros(0, np.int32)
        logprobs = np.concatenate([piece[1] for piece in self.pieces]) if self.pieces else np.zeros(0, np.float32)
        versions = tuple(version for tokens, _, version in self.pieces for _ in tokens)
        ids = tuple(ids.tolist())
        ended = bool(ids) and ids[-1] in self.sampling.stop_ids
        return Response(ids, ended, float(logprobs.sum()), tuple(logprobs.tolist()), versions, error, self.reused)


def refuse(prompt: Sequence[int], new: int, max_length: int, vocab: int) -> str | None:
    """Why a prompt cannot be answered with `new` tokens within `max_length`; None if it can."""
    if len(prompt) == 0:
        return "a prompt is empty; at least one token is expected"
    limit = max_length - new
    if len(prompt) > limit:
        return (
            f"a prompt has {len(prompt)} tokens, but model.max_length {max_length} minus {new} new tokens leaves only "
            f"{limit}; raise model.max_length or shorten the prompt"
        )
    ids = np.asarray(prompt)
    if ids.dtype.kind not in "iu" or ids.ndim > 1:
        broken = [token for token in prompt if not isinstance(token, int | np.integer)]
        if broken:
            return f"a prompt has {broken[0]!r} among its token ids; integers are expected"
    if ids.min() < 0 or ids.max() >= vocab:
        unknown = next(token for token in prompt if not 0 <= token < vocab)
        return f"a prompt has the token id {unknown}, but the model's token ids are 0 to {vocab - 1}"
    return None


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
