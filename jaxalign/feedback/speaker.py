"""A language model that reads and writes text: an engine, its weights and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.heads import gather_positions
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.responses import BROKEN, Response
from jaxalign.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Utterance:
    """A sampled text: the text, its ids (including the end token, if any), whether it ended before the length limit, its
    log-probability, and whether the model's logits were finite."""

    text: str
    ids: tuple[int, ...]
    ended: bool
    logprob: float
    finite: bool = True


Counted = Callable[[Sequence[int], int, int], None]
"""Called after each piece of work with the lengths of the texts that the model read or wrote, the number of tokens to count,
and the number of positions at which the LM head was applied."""


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer. `counted`, if given, receives the work that the model does."""

    engine: Engine
    params: Any
    tokenizer: Tokenizer
    counted: Counted | None = None

    def say_ids(
        self, ids: Sequence[list[int]], key: jax.Array, sampling: Sampling, numbers: Sequence[int]
    ) -> list[Utterance]:
        """Samples one continuation of each prompt. Continuation i has the global row number numbers[i].

        A prompt that leaves no space for max_new_tokens gets an empty answer that did not end; other prompts are not affected.
        The same holds, with a warning, for a prompt with non-finite logits.

        Raises:
          UserError: a prompt is empty, or there are several prompts and none has finite logits.
        """
        rows = [i for i, prompt in enumerate(ids) if self.fits(prompt, sampling.max_new_tokens)]
        out = [Utterance("", (), False, 0.0)] * len(ids)
        asked = [ids[i] for i in rows]

        def on_end(ended: Sequence[tuple[int, Response]]) -> None:
            written = sum(len(response.ids) for _, response in ended)
            self.counted([len(asked[i]) + len(response.ids) for i, response in ended], written, written)

        responses = self.engine.respond(
            self.params, asked, key, sampling, [numbers[i] for i in rows], on_end if self.counted else None
        )
        for i, response in zip(rows, responses, strict=True):
            if response.error == BROKEN:
                out[i] = Utterance("", (), False, 0.0, finite=False)
                continue
            if response.error is not None:
                raise UserError(f"sampling of row {numbers[i]}: {response.error}")
            words = response.ids[:-1] if response.ended else response.ids
            out[i] = Utterance(self.tokenizer.decode(words), response.ids, response.ended, response.logprob)
        _report_broken(sum(response.error == BROKEN for response in responses), len(rows), "answers count as cut off")
        return out

    def next_logprobs(self, prompts: Sequence[Sequence[int]], tokens: np.ndarray) -> np.ndarray:
        """float32 [B, O]: log-probabilities of `tokens` int32 [O] right after each prompt; all prompts must fit. NaN, with a
        warning, for non-finite logits. Raises UserError if there are several prompts and none has finite logits."""
        engine, order = self.engine, sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out = np.zeros((len(prompts), len(tokens)), np.float32)
        for start in range(0, len(order), engine.batch):
            index = order[start : start + engine.batch]
            ids, length = engine.pad([prompts[i] for i in index], 1)
            arrays = place_rows(engine.model.sharding, (ids, np.maximum(length, 1)))
            out[index] = fetch(next_logprobs(engine.model, self.params, *arrays, tokens))[: len(index)]
            if self.counted:
                self.counted(length[: len(index)].tolist(), int(length.sum()), len(index))
        _report_broken(int(np.isnan(out).any(axis=1).sum()), len(out), "judgements are left out")
        return out

    def fits(self, prompt: Sequence[int], max_new_tokens: int) -> bool:
        return len(prompt) + max_new_tokens <= self.engine.max_length


def _report_broken(count: int, total: int, what: str) -> None:
    """Warns about rows with non-finite logits. Raises UserError if this affects all of several rows: the model is broken."""
    if count == total > 1:
        raise UserError(f"{BROKEN} for any of {total} prompts: its weights are not finite, or its computations overflow")
    if count:
        logging.getLogger("jaxalign").warning(f"{count} of {total} {what}: {BROKEN}")


@functools.partial(jax.jit, static_argnames=("model",))
def next_logprobs(model: Model, params, tokens, length, wanted):
    """float32 [B, O]: log-probabilities of the tokens `wanted` int32 [O] after each row of tokens [B, T] of length [B]."""
    last = gather_positions(model.hidden(params, tokens), (length - 1)[:, None])[:, 0]
    return jax.nn.log_softmax(model.logits(params, last), axis=-1)[:, wanted]


