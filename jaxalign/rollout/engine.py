"""Generation: responses to any number of prompts, by continuous batching (docs/rollout.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.ahead import Ahead
from jaxalign.records import Rollout
from jaxalign.rollout.forecast import compile_ahead
from jaxalign.rollout.padding import Padding
from jaxalign.rollout.responses import Response
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session

OnFinished = Callable[[Sequence[tuple[int, Response]]], None]
"""Receives each response once, when it ends, as (index among the prompts, response)."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Answers prompts with a model.

    Attributes:
      model: the architecture.
      batch: the maximum number of rows that decode together; a multiple of the number of parts into which the mesh splits them.
      max_length: the maximum length of prompt plus response, in tokens.
      bucket: prompts are padded to this length times a power of two, so that few shapes are compiled.
      share_prefix: whether different prompts with a common beginning compute it once, if the model can continue it.

    Raises:
      UserError: the mesh does not divide the batch, or the bucket is below 1.
    """

    model: Model
    batch: int
    max_length: int
    bucket: int = 32
    share_prefix: bool = False

    def __post_init__(self):
        parts = self.model.sharding.generation.batch_size
        if self.batch < 1 or self.batch % parts:
            raise UserError(f"the number of rows that are sampled together is {self.batch}; the mesh splits them into {parts} "
                            f"parts, so a multiple of {parts} is expected: change the batch size or the mesh")
        if self.bucket < 1:
            raise UserError(f"prompts cannot be padded to {self.bucket} tokens; at least 1 is expected")

    def start(
        self, params, prompts: Sequence[Sequence[int]], key: jax.Array, sampling: Sampling, rows: Sequence[int],
        version: int = 0,
    ) -> Session:
        """Returns a `Session` that does the work of `respond` step by step.

        Args:
          params: the weights.
          prompts: token ids.
          key: a PRNG key, for example a run's key folded with its step.
          sampling: the sampling settings.
          rows: the global row number of each prompt.
          version: the version of the weights.
        """
        sizes = self.batch, self.max_length, self.bucket
        session = Session(self.model, params, key, sampling, *sizes, version, self.share_prefix)
        session.submit(prompts, rows)
        return session

    def respond(
        self, params, prompts: Sequence[Sequence[int]], key: jax.Array, sampling: Sampling, rows: Sequence[int],
        on_finished: OnFinished | None = None,
    ) -> list[Response]:
        """Responses to a queue of any length, in its order. After each chunk, `on_finished` gets the responses that have
        ended, if any.

        Prompt i has the global row number rows[i], whatever slot it enters. A prompt that is empty, too long or has unknown ids
        gets a response without ids and with an `error`; a row whose logits are not finite also gets an `error`. Threads compile
        the programs that the queue needs while sampling runs (`forecast.py`).

        Raises:
          UserError: a row number is not an int32 of at least 0.
        """
        out: list[Response | None] = [None] * len(prompts)
        if not out:
            return []
        session = self.start(params, prompts, key, sampling, rows)
        with Ahead() as ahead:
            compile_ahead(ahead, session)
            while session.unfinished:
                ended = session.step()
                for index, response in ended:
                    out[index] = response
                if on_finished is not None and ended:
                    on_finished(ended)
        return out

    def rollout(
        self, params, prompts: Sequence[Sequence[int]], key, rows: Sequence[int], sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """The responses as numpy arrays, the same on every process; `rows` are the prompts' global row numbers.

        Rows are padded to a multiple of `batch`; padding rows have length 0. A row has space for the longest prompt, padded as
        in `pad`, and sampling.max_new_tokens. Without prompts there are no rows.

        Raises:
          UserError: a prompt has no response.
        """
        self.pad(prompts, sampling.max_new_tokens)
        responses = self.respond(params, prompts, key, sampling, rows, on_finished)
        return dataclasses.replace(self.padding.rollout(prompts, responses, rows, sampling), versions=None)

    @property
    def padding(self) -> Padding:
        """The shape of the arrays for this engine's prompts and responses."""
        return Padding(self.batch, self.max_length, self.bucket, self.model.config.vocab)

    def pad(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """`Padding.prompts` with this engine's `padding`."""
        return self.padding.prompts(prompts, max_new_tokens)
