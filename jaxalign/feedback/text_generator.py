"""Generates texts and computes log-probabilities with a language model: an engine, its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.heads import gather_positions
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.rollout.prefixes import SharedBatch, plan_batches
from jaxalign.rollout.responses import BROKEN, Response
from jaxalign.rollout.sampler import Engine, LocalSampler, respond
from jaxalign.rollout.sampling import Sampling

WANTED = 16
"""`TextGenerator.next_logprobs` looks up a multiple of this number of tokens, so that verdicts with different options share a
program."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A sampled text: the text, its ids (including the end token, if any), whether it ended before the length limit, its
    log-probability, and whether the model's logits were finite."""

    text: str
    ids: tuple[int, ...]
    ended: bool
    logprob: float
    finite: bool = True


class Counted(Protocol):
    """A function that is called after each piece of work."""

    def __call__(self, lengths: Sequence[int], tokens: int, heads: int, before: Sequence[int] = ()) -> None:
        """Counts work.

        Args:
          lengths: the lengths of the texts that the model read or wrote.
          tokens: the number of tokens to count.
          heads: the number of positions at which the LM head was applied.
          before: for each text, the number of its first tokens that were computed earlier; empty: none.
        """


@dataclasses.dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer. `counted`, if given, receives the work that the model does. With `engine.share_prefix` the
    common beginning of several prompts is computed once, if the model can continue it."""

    engine: Engine
    params: Any
    tokenizer: Tokenizer
    counted: Counted | None = None

    def generate(
        self, prompts: Sequence[list[int]], key: jax.Array, sampling: Sampling, row_ids: Sequence[int]
    ) -> list[Completion]:
        """Samples one completion of each prompt. Completion i has the global row number row_ids[i].

        A prompt that leaves no space for max_new_tokens gets an empty answer that did not end; other prompts are not affected.
        The same holds, with a warning, for a prompt with non-finite logits.

        Raises:
          UserError: a prompt is empty, or there are several prompts and none has finite logits.
        """
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) + sampling.max_new_tokens <= self.engine.max_length]
        completions = [Completion("", (), False, 0.0)] * len(prompts)

        def on_end(ended: Sequence[tuple[int, Response]]) -> None:
            written = sum(len(response.ids) for _, response in ended)
            lengths = [len(prompts[fitting[i]]) + len(response.ids) for i, response in ended]
            self.counted(lengths, written, written, [response.reused for _, response in ended])

        sampler = LocalSampler(self.engine, self.params)
        asked, rows = [prompts[i] for i in fitting], [row_ids[i] for i in fitting]
        responses = respond(sampler, asked, key, rows, sampling, on_end if self.counted else None)
        for i, response in zip(fitting, responses, strict=True):
            if response.error == BROKEN:
                completions[i] = Completion("", (), False, 0.0, finite=False)
                continue
            if response.error is not None:
                raise UserError(f"sampling of row {row_ids[i]}: {response.error}")
            words = response.ids[:-1] if response.ended else response.ids
            completions[i] = Completion(self.tokenizer.decode(words), response.ids, response.ended, response.logprob)
        _report_broken(sum(response.error == BROKEN for response in responses), len(rows), "answers count as cut off")
        return completions

    def next_logprobs(self, prompts: Sequence[Sequence[int]], tokens: np.ndarray) -> np.ndarray:
        """float32 [B, O]: log-probabilities of `tokens` int32 [O] right after each prompt; all prompts must fit. NaN, with a
        warning, for non-finite logits. Raises UserError if there are several prompts and none has finite logits."""
        logprobs = np.zeros((len(prompts), len(tokens)), np.float32)
        wanted = np.pad(tokens, (0, -len(tokens) % WANTED))
        shared = self._shared(prompts)
        for index, batch in self._alone(prompts, wanted) if shared is None else self._together(shared, wanted):
            logprobs[index] = batch[:, : len(tokens)]
        _report_broken(int(np.isnan(logprobs).any(axis=1).sum()), len(logprobs), "judgements are left out")
        return logprobs

    def _shared(self, prompts: Sequence[Sequence[int]]) -> list[SharedBatch] | None:
        """The batches in which to compute the prompts with shared prefixes; None to compute each prompt by itself."""
        engine = self.engine
        if not engine.share_prefix or not engine.model.continues:
            return None
        engine.padding.check(prompts, 1)
        unshared = sum(engine.batch * engine.padding.length([prompts[i] for i in index], 1) for index in self._batches(prompts))
        return plan_batches(prompts, engine.batch, engine.model.sharding.batch_size, engine.bucket, unshared)

    def _batches(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """The indices of prompts of similar length, for each batch."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        return (order[start : start + self.engine.batch] for start in range(0, len(order), self.engine.batch))

    def _alone(self, prompts: Sequence[Sequence[int]], tokens: np.ndarray) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """Yields the indices of prompts, and their log-probabilities."""
        model = self.engine.model
        for index in self._batches(prompts):
            ids, length = self.engine.padding.prompts([prompts[i] for i in index], 1)
            arrays = place_rows(model.sharding, (ids, np.maximum(length, 1)))
            yield index, fetch(next_logprobs(model, self.params, *arrays, tokens))[: len(index)]
            if self.counted:
                self.counted(length[: len(index)].tolist(), int(length.sum()), len(index))

    def _together(self, batches: Sequence[SharedBatch], tokens: np.ndarray) -> Iterator[tuple[Sequence[int], np.ndarray]]:
        """Like `_alone`, with shared prefixes."""
        model = self.engine.model
        for batch in batches:
            arrays = place_rows(model.sharding, (batch.prefixes, batch.counts, batch.tokens, batch.lengths))
            used = batch.rows >= 0
            yield batch.rows[used], fetch(shared_logprobs(model, self.params, *arrays, tokens))[used]
            if self.counted:
                G, R = len(batch.counts), len(batch.rows) // len(batch.counts)
                prefix = np.repeat(batch.counts, R)
                before = np.where(np.tile(np.arange(R), G) == 0, 0, prefix)  # The first text of a group counts the prefix.
                lengths, before = (prefix + batch.lengths)[used], before[used]
                self.counted(lengths.tolist(), int(np.sum(lengths - before)), len(lengths), before.tolist())


def _report_broken(count: int, total: int, effect: str) -> None:
    """Warns about rows with non-finite logits. Raises UserError if this affects all of several rows: the model is broken."""
    if count == total > 1:
        raise UserError(f"{BROKEN} for any of {total} prompts: its weights are not finite, or its computations overflow")
    if count:
        logging.getLogger("jaxalign").warning(f"{count} of {total} {effect}: {BROKEN}")


@functools.partial(MeshProgram, static_argnames=("model",))
def next_logprobs(model: Model, params, tokens, length, wanted):
    """float32 [B, O]: log-probabilities of the tokens `wanted` int32 [O] after each row of tokens [B, T] of length [B]."""
    last = gather_positions(model.hidden(params, tokens), (length - 1)[:, None])[:, 0]
    return jax.nn.log_softmax(model.logits(params, last), axis=-1)[:, wanted]


@functools.partial(MeshProgram, static_argnames=("model",))
def shared_logprobs(model: Model, params, prefixes, counts, tokens, length, wanted):
    """`next_logprobs` of texts that continue prefixes. prefixes, counts, tokens: see `Model.hidden_after`. length int32 [B]:
    the number of tokens of each text after its prefix, at least 1."""
    last = gather_positions(model.hidden_after(params, prefixes, counts, tokens), (length - 1)[:, None])[:, 0]
    return jax.nn.log_softmax(model.logits(params, last), axis=-1)[:, wanted]
