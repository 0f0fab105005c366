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

Heard = Callable[[Sequence[tuple[int, Response]]], None]
"""Takes what has just ended, each once: (index among the prompts, its response)."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Answers prompts with a model.

    batch: slots, the rows that decode together at most; a multiple of what the mesh splits a batch into while it samples.
    bucket: prompts are padded to this length, or to its double, and so on, so that few shapes are compiled. max_length: prompt
    and response together. Raises UserError on a batch that the mesh does not divide, and on a bucket below 1.
    """

    model: Model
    batch: int
    max_length: int
    bucket: int = 32

    def __post_init__(self):
        parts = 1 if self.model.sharding is None else self.model.sharding.generation.batch_size
        if self.batch < 1 or self.batch % parts:
            raise UserError(f"the number of rows that are sampled together is {self.batch}; the mesh splits them into {parts} "
                            f"parts, so a multiple of {parts} is expected: change the batch, or the mesh")
        if self.bucket < 1:
            raise UserError(f"prompts are to be padded to {self.bucket} tokens; at least 1 is expected")

    def start(
        self, params, prompts: Sequence[Sequence[int]], key: jax.Array, sampling: Sampling, rows: Sequence[int],
        version: int = 0,
    ) -> Session:  # fmt: skip
        """The work of `respond`, to be done step by step: see `Session`.

        Args:
          params: the weights.
          prompts: token ids.
          key: a run's key folded with its step.
          sampling: how to sample.
          rows: the global row number of each prompt.
          version: of the weights.
        """
        session = Session(self.model, params, key, sampling, self.batch, self.max_length, self.bucket, version)
        session.submit(prompts, rows)
        return session

    def respond(
        self, params, prompts: Sequence[Sequence[int]], key: jax.Array, sampling: Sampling, rows: Sequence[int],
        heard: Heard | None = None,
    ) -> list[Response]:  # fmt: skip
        """Responses to a queue of any length, in its order. `heard` is called with what each chunk ends, if it ends any.

        Prompt i has the global row number rows[i], whatever slot it enters. An empty queue has no responses. A prompt that is
        empty, leaves no room or has ids that the model does not know has one without ids, whose `error` says so; so does a row
        whose logits are no finite numbers. Raises UserError on a row number that is no int32 of 0 or more.

        What the queue will need is compiled in threads from its beginning on (`forecast.py`).
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
                if heard is not None and ended:
                    heard(ended)
        return out

    def rollout(
        self, params, prompts: Sequence[Sequence[int]], key, rows: Sequence[int], sampling: Sampling, heard: Heard | None = None
    ) -> Rollout:
        """The responses as arrays on the host (numpy), the same on every process; `rows` are the prompts' global numbers.

        Rows fill up to a multiple of `batch`; those without a prompt have length 0. A row has room for the longest prompt,
        padded as `pad` does, and sampling.max_new_tokens; without prompts there are no rows. Raises UserError where a prompt
        has no response.
        """
        self.pad(prompts, sampling.max_new_tokens)
        responses = self.respond(params, prompts, key, sampling, rows, heard)
        return dataclasses.replace(self.padding.rollout(prompts, responses, rows, sampling), versions=None)

    @property
    def padding(self) -> Padding:
        """The shape of the arrays that prompts and responses of this engine go into."""
        return Padding(self.batch, self.max_length, self.bucket, self.model.config.vocab)

    def pad(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """`Padding.prompts` of this engine's `padding`."""
        return self.padding.prompts(prompts, max_new_tokens)
