"""Generates token ids: the `TokenSampler` protocol, its local implementation by continuous batching (docs/rollout.md), and
functions that wait for the responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.ahead import Ahead
from jaxalign.records import Rollout
from jaxalign.registry.core import has_methods
from jaxalign.registry.custom import custom_code
from jaxalign.registry.samplers import METHODS, sampler_record
from jaxalign.rollout.forecast import compile_ahead
from jaxalign.rollout.responses import Padding, Response
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session

OnFinished = Callable[[Sequence[tuple[int, Response]]], None]
"""Receives each response once, when it ends, as (index among the prompts, response)."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model and the sizes of its batches.

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
        """Returns a `Session` that answers the prompts step by step.

        Args:
          params: the weights.
          prompts: token ids.
          key: a PRNG key, for example a run's key folded with its step.
          sampling: the sampling settings.
          rows: the global row number of each prompt.
          version: the version of the weights.
        """
        sizes = self.batch, self.max_length, self.bucket
        session = Session(self.model, params, *sizes, version, self.share_prefix)
        session.submit(prompts, rows, key, sampling)
        return session

    @property
    def padding(self) -> Padding:
        """The shape of the arrays for this engine's prompts and responses."""
        return Padding(self.batch, self.max_length, self.bucket, self.model.config.vocab)


class TokenSampler(Protocol):
    """Generates responses to prompts with the newest weights that it has received.

    A response depends only on the weights, the key, its row number and its prompt, not on the order in which rows are sampled.
    """

    @property
    def unfinished(self) -> int:
        """The number of submitted prompts whose response `collect` has not returned yet."""
        ...

    def submit(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], key: jax.Array, sampling: Sampling) -> None:
        """Adds prompts to the queue.

        Args:
          prompts: token ids.
          rows: the global row number of each prompt, int32 and at least 0. Numbers of unfinished rows are distinct.
          key: a PRNG key; the sampler folds the row number and the position into it.
          sampling: temperature, top-k, top-p, the maximum number of new tokens, and the ids that end a response.
        """
        ...

    def collect(self) -> Sequence[tuple[int, Response]]:
        """Returns the responses that have finished since the last call, each with its row number, in any order.

        It may block while it samples. It may return nothing while rows are unfinished; call it again.
        """
        ...

    def update(self, params: Any, version: int) -> None:
        """Sets new weights. Tokens sampled from now on have this version.

        Args:
          params: the policy's parameters, adapters joined with their base.
          version: the number of updates that the weights have had.
        """
        ...


class LocalSampler:
    """Samples with an engine in this process. Prompts that are submitted while others decode join their batch, also with other
    settings and another key."""

    def __init__(self, engine: Engine, params: Any = None, version: int = 0):
        self.engine = engine
        self._params, self._version = params, version
        self._session: Session | None = None  # Exists only while rows are unfinished: it holds weights for generation.
        self._ahead: Ahead | None = None
        self._rows: dict[int, int] = {}  # The row number of each unfinished index of the session.

    @property
    def unfinished(self) -> int:
        return len(self._rows)

    def submit(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], key: jax.Array, sampling: Sampling) -> None:
        if self._params is None:
            raise UserError("the sampler has no weights yet; call update(params, version) first")
        if not prompts:
            return
        session = self._session
        if session is None:
            session = self.engine.start(self._params, prompts, key, sampling, rows, self._version)
            self._session, self._ahead = session, Ahead()
        else:
            session.submit(prompts, rows, key, sampling)
        self._rows |= zip(range(session.submitted - len(prompts), session.submitted), rows, strict=True)
        if session.tiers is None:
            compile_ahead(self._ahead, session)

    def collect(self) -> list[tuple[int, Response]]:
        if self._session is None:
            return []
        try:
            ended = [(self._rows.pop(index), response) for index, response in self._session.step()]
        except BaseException:
            self._rows = {}
            raise
        finally:
            if not self._rows:
                self._ahead.close()
                self._session, self._ahead = None, None
        return ended

    def update(self, params: Any, version: int) -> None:
        self._params, self._version = params, version
        if self._session is not None:
            self._session.swap(params, version)

    def written(self, row: int) -> tuple[int, ...]:
        """The tokens so far of an unfinished row that is being decoded; empty for another row."""
        index = next((index for index, number in self._rows.items() if number == row), None)
        return () if index is None else self._session.written(index)


def make_sampler(
    sampler: str | TokenSampler | Callable[[Engine], TokenSampler], engine: Engine, where: str = "sampler"
) -> TokenSampler:
    """Creates the sampler that a config field or an argument specifies.

    Args:
      sampler: a registered name, "package.module:name", "FILE.py:name", a sampler, or a function from an engine to a sampler.
      engine: the engine of the local sampler; a custom sampler may use its model and sizes.
      where: the config field or argument, for the error message.

    Raises:
      UserError: `sampler` is none of these.
    """
    require_sampler(sampler, where)
    if has_methods(sampler, METHODS) and not isinstance(sampler, type):
        created = sampler
    else:
        make = sampler_record(sampler, where).load() if isinstance(sampler, str) else sampler
        with custom_code(where):
            created = make(engine)
    if isinstance(created, type) or not has_methods(created, METHODS):
        raise UserError(f"{where} is {sampler!r}, which creates an object of type {type(created).__name__}; one with the "
                        "methods submit, collect and update is expected")
    return created


def require_sampler(sampler: Any, where: str) -> None:
    """Raises UserError unless `sampler` has one of the forms that `make_sampler` takes. where: as there."""
    if isinstance(sampler, str):
        sampler_record(sampler, where)
    elif not callable(sampler) and not has_methods(sampler, METHODS):
        raise UserError(f"{where} is {sampler!r} of type {type(sampler).__name__}; a registered name, 'package.module:name', "
                        "one with the methods submit, collect and update, or a function from an engine to one is expected")


def respond(
    sampler: TokenSampler, prompts: Sequence[Sequence[int]], key: jax.Array, rows: Sequence[int], sampling: Sampling,
    on_finished: OnFinished | None = None,
) -> list[Response]:
    """The response to each prompt, in the order of the prompts.

    A prompt that is empty, too long or has unknown ids gets a response without ids and with an `error`; a row whose logits are
    not finite also gets an `error`.

    Args:
      sampler: a sampler without unfinished rows.
      prompts: token ids.
      key: a PRNG key.
      rows: the global row number of each prompt; all different.
      sampling: the sampling settings.
      on_finished: called with the responses that each `collect` returns, as (index among the prompts, response).

    Raises:
      UserError: the sampler returns a row that was not submitted, or a row twice, or already has unfinished rows.
    """
    if sampler.unfinished:
        raise UserError(f"the sampler has {sampler.unfinished} unfinished rows; collect them before submitting more prompts")
    index = {row: i for i, row in enumerate(rows)}
    if len(index) != len(prompts):
        raise UserError(f"there are {len(prompts)} prompts and {len(index)} different row numbers; one for each is expected")
    out: list[Response | None] = [None] * len(prompts)
    sampler.submit(prompts, rows, key, sampling)
    left = len(prompts)
    while left:
        if not sampler.unfinished:
            missing = next(row for row, i in index.items() if out[i] is None)
            raise UserError(f"the sampler has finished without a response for row {missing}")
        ended = []
        for row, response in sampler.collect():
            if row not in index:
                raise UserError(f"the sampler returned row {row!r}, which was not submitted")
            i = index[row]
            _check_response(response, sampling, row)
            if out[i] is not None:
                raise UserError(f"the sampler returned row {rows[i]} twice")
            out[i] = response
            ended.append((i, response))
        left -= len(ended)
        if on_finished is not None and ended:
            on_finished(ended)
    return out


def sample_rollout(
    sampler: TokenSampler, padding: Padding, prompts: Sequence[Sequence[int]], key: jax.Array, rows: Sequence[int],
    sampling: Sampling, on_finished: OnFinished | None = None, *, versions: bool = True,
) -> Rollout:
    """Samples a response to each prompt and returns them as numpy arrays, the same on every process.

    Args:
      sampler: a sampler without unfinished rows.
      padding: the shape of the arrays. Rows are padded to a multiple of `padding.batch`; padding rows have length 0.
      prompts: token ids.
      key: a PRNG key.
      rows: the global row number of each prompt; all different.
      sampling: the sampling settings. The arrays have space for `sampling.max_new_tokens` after the longest prompt.
      on_finished: called with responses as they finish, as (index among the prompts, response).
      versions: whether the rollout has the version of the weights that generated each token.

    Returns:
      The rollout. Without prompts it has no rows.

    Raises:
      UserError: a prompt cannot be answered, or the sampler does not return exactly one response to each row.
    """
    padding.check(prompts, sampling.max_new_tokens)  # Raise for a prompt that does not fit before sampling anything.
    rollout = padding.rollout(prompts, respond(sampler, prompts, key, rows, sampling, on_finished), rows, sampling)
    return rollout if versions else dataclasses.replace(rollout, versions=None)


def _check_response(response: Response, sampling: Sampling, row: int) -> None:
    """Raises UserError if a custom sampler's response is malformed."""
    if not isinstance(response, Response):
        raise UserError(f"the sampler returned an object of type {type(response).__name__} for row {row}; a Response "
                        "is expected")
    count = len(response.ids)
    if response.error is None and not 0 < count <= sampling.max_new_tokens:
        raise UserError(f"the sampler returned {count} tokens for row {row}; 1 to {sampling.max_new_tokens} are expected")
    for name in ("logprobs", "versions"):
        if len(getattr(response, name)) != count:
            raise UserError(f"the sampler returned {count} tokens and {len(getattr(response, name))} {name} for row {row}; one "
                            "for each token is expected")
