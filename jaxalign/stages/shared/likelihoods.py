"""Measures of evaluated models by log-probabilities, without sampling: the loss on held-out plain text, and the accuracy on
questions with several answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.win_rates import mean_difference
from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.sources.asked import Question, read_questions, read_texts
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model, Params
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Rollout
from jaxalign.rl.responses import response_mask, response_stats
from jaxalign.stages.shared import engines, run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.steps import work
from jaxalign.tracking.progress import Progress
from jaxalign.tracking.timing import Timing
from jaxalign.trainers.evaluation import rate

LEAST_WIDTH = 32
"""Rows are padded to this number of tokens times a power of two, so that few shapes are compiled."""
CHOICE_MEASURES = ("choices", "choices_per_token")
"""The choice with the highest log-probability, in total and per token."""


class Continuation(NamedTuple):
    """Token ids whose log-probability is asked, and the ids before them; neither is empty."""

    prefix: Sequence[int]
    target: Sequence[int]


class LikelihoodMeasures:
    """The texts and questions of a run. Constructing it reads and encodes them, so that errors precede the sampling.

    Raises:
      UserError: a file cannot be read, the style refuses a prompt, or an answer does not fit in `config.model.max_length`.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        section, length = config.evaluate, config.model.max_length
        texts = [(text, windows(tokenizer, text, length)) for text in (read_texts(section.texts) if section.texts else [])]
        self._texts = [own for _, own in texts if own]
        scored = [text for text, own in texts if own]
        self._bytes = sum(len(text.encode()) for text in scored)
        if not tokenizer.begin_ids:  # Without bos, `windows` does not score the first token of a text.
            self._bytes -= sum(len(tokenizer.decode(tokenizer.encode(text)[:1]).encode()) for text in scored)
        if texts and not self._texts:
            raise UserError(f"config.evaluate.texts is {section.texts!r}, but each of its texts is a single token, which has "
                            "no token before it; give longer texts")
        self._questions = read_questions(section.choices) if section.choices else []
        self._choices = [_choices(tokenizer, question, config.data.style, length) for question in self._questions]
        self._batch, self._length = section.batch, length

    def summary(self, context: StageContext, model: Model, names: Sequence[str]) -> dict[str, Any]:
        """The fields of summary.json on the texts and the questions, and "paired" with the differences from the first model.

        Empty without texts and questions; no weights are then read.
        """
        if not self._texts and not self._questions:
            return {}
        timing, losses, answers = engines.timing(context, model), {}, {}
        total = len(names) * sum(map(len, (*self._texts, *self._choices)))
        with Progress("evaluate", total, unit="log-probability") as progress:
            for name in names:
                measured = self._sums(context, model, name, timing, progress)
                losses[name] = -np.asarray([own.sum() for own in measured[: len(self._texts)]])
                answers[name] = measured[len(self._texts) :]
        text_fields, choice_fields = self._text_summary(losses, names), self._choice_summary(answers, names)
        pairs = [fields.pop("paired", {}) for fields in (text_fields, choice_fields)]
        return text_fields | choice_fields | {"paired": {name: pairs[0].get(name, {}) | pairs[1].get(name, {})
                                                         for name in names[1:]}}

    def _sums(
        self, context: StageContext, model: Model, name: str, timing: Timing, progress: Progress
    ) -> list[np.ndarray]:
        """The log-probabilities of the windows of each text, then of the choices of each question. The weights are freed on
        return."""
        groups = [*self._texts, *self._choices]
        params = run_models.stage_params(context, name, model)
        sums = log_probabilities(model, params, [one for own in groups for one in own], self._batch, self._length, timing)
        progress.update(len(sums))
        return np.split(sums, np.cumsum([len(own) for own in groups])[:-1])

    def _text_summary(self, losses: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
        if not self._texts:
            return {}
        tokens = np.asarray([sum(len(one.target) for one in own) for own in self._texts], np.float64)
        per_token = {name: loss / np.maximum(tokens, 1) for name, loss in losses.items()}
        first = per_token[names[0]]
        return {
            "texts": {"documents": len(tokens), "tokens": int(tokens.sum()), "bytes": self._bytes},
            "text_loss": {name: float(loss.sum() / tokens.sum()) for name, loss in losses.items()},
            "text_loss_per_byte": {name: float(loss.sum() / self._bytes) for name, loss in losses.items()},
            "paired": {name: {"text_loss": mean_difference(per_token[name], first, weights=tokens)} for name in names[1:]},
        }

    def _choice_summary(self, answers: Mapping[str, list[np.ndarray]], names: Sequence[str]) -> dict[str, Any]:
        if not self._questions:
            return {}
        right = {name: self._right(own) for name, own in answers.items()}
        return {
            "choices": {name: {measure: rate(right[name][measure]) for measure in CHOICE_MEASURES} for name in names},
            "paired": {name: {measure: mean_difference(right[name][measure], right[names[0]][measure])
                              for measure in CHOICE_MEASURES} for name in names[1:]},
        }

    def _right(self, answers: Sequence[np.ndarray]) -> dict[str, list[bool]]:
        """Whether the best choice of each question is the correct one. A tie with the correct one is wrong."""
        lengths = [np.asarray([len(one.target) for one in own]) for own in self._choices]
        scores = {"choices": answers, "choices_per_token": [own / n for own, n in zip(answers, lengths, strict=True)]}
        return {measure: [bool(np.all(np.delete(own, question.correct) < own[question.correct]))
                          for own, question in zip(values, self._questions, strict=True)]
                for measure, values in scores.items()}


def windows(tokenizer: Tokenizer, text: str, length: int) -> list[Continuation]:
    """A text as windows of at most `length` tokens, each after the last token of the window before.

    The first window follows bos. Without bos, the first token of the text is not scored, and a text of one token has no
    windows.
    """
    ids = [*tokenizer.begin_ids, *tokenizer.encode(text)]
    first = max(len(tokenizer.begin_ids), 1)
    starts = range(first, len(ids), length - first)
    return [Continuation(ids[:first] if at == first else ids[at - 1 : at], ids[at : at + length - first]) for at in starts]


def _choices(tokenizer: Tokenizer, question: Question, style: str, length: int) -> list[Continuation]:
    """The answers of a question with their end tokens. A prompt that is too long loses its oldest tokens."""
    with styles.naming(question.place):
        prompt = styles.encode_prompt(tokenizer, question.messages, style)
    answers = [styles.encode_answer(tokenizer, choice, style) for choice in question.choices]
    longest = max(map(len, answers))
    if longest >= length:
        raise UserError(f"{question.place} a choice has {longest} tokens, but config.model.max_length is {length}; raise it, "
                        "or leave the row out")
    return [Continuation(prompt[-(length - longest) :], answer) for answer in answers]


def log_probabilities(
    model: Model, params: Params, continuations: Sequence[Continuation], batch: int, length: int, timing: Timing
) -> np.ndarray:
    """float64 [B]: the sum of the log-probabilities of each target's tokens, nats.

    Args:
      model, params: a model with an LM head and its weights.
      continuations: B continuations.
      batch: the rows of a batch. Rows of similar length share one.
      length: the maximum number of tokens of a row.
      timing: gets the phase "log-probabilities".
    """
    sums = np.zeros(len(continuations))
    order = sorted(range(len(continuations)), key=lambda i: len(continuations[i].prefix) + len(continuations[i].target))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        rollout = _as_rollout([continuations[i] for i in rows], batch, length)
        with timing.phase("log-probabilities") as phase:
            phase.tokens, phase.flops = work.logprobs(model, rollout)
            sums[rows] = fetch(_target_sums(model, params, place_rows(model.sharding, rollout)))[: len(rows)]
    return sums


@functools.partial(MeshProgram, static_argnames=("model",))
def _target_sums(model: Model, params: Params, rollout: Rollout) -> jax.Array:
    logprobs = response_stats(model, params, rollout, 1.0).logprobs
    return jnp.where(response_mask(rollout) > 0, logprobs, 0.0).sum(axis=1)


def _as_rollout(continuations: Sequence[Continuation], batch: int, length: int) -> Rollout:
    """The continuations as responses, with the last one repeated up to `batch` rows."""
    rows = [*continuations, *[continuations[-1]] * (batch - len(continuations))]
    width = min(length, _bucket(max(len(one.prefix) + len(one.target) for one in rows)))
    longest = min(width, _bucket(max(len(one.target) for one in rows)))
    tokens = np.zeros((batch, width), np.int32)
    for row, one in zip(tokens, rows, strict=True):
        row[: len(one.prefix) + len(one.target)] = [*one.prefix, *one.target]
    lengths = (np.asarray([len(getattr(one, side)) for one in rows], np.int32) for side in ("prefix", "target"))
    return Rollout(tokens, *lengths, np.zeros((batch, longest), np.float32), np.zeros(batch, bool))


def _bucket(length: int) -> int:
    width = LEAST_WIDTH
    while width < length:
        width *= 2
    return width
