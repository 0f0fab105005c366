"""Responses, rows being decoded, and the reasons why a prompt cannot be answered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxalign.rollout.sampling import Sampling

BROKEN = "the model's logits are not finite numbers"
"""The error of a row whose logits are not finite."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response.

    Attributes:
      ids: its tokens, including the stop token if there is one.
      ended: whether a stop token ended it.
      logprob: the sum of `logprobs`.
      logprobs: the log-probability of each token at the sampling temperature.
      versions: the version of the weights that generated each token.
      error: why the response is missing or incomplete; None for a complete one.
      reused: the number of the prompt's first tokens whose keys and values were computed for another row.
    """

    ids: tuple[int, ...]
    ended: bool
    logprob: float
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    error: str | None = None
    reused: int = dataclasses.field(default=0, compare=False)


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
