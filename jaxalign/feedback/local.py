"""The local judge: a language model in this process that reads requests through a template set."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxalign.algorithms import labels
from jaxalign.config import FeedbackConfig
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.files import THINKING, thinking_variables
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.judge import ComparisonRequest, Draw, Rating, RatingRequest, Text, Verdict, template_values
from jaxalign.feedback.options import option_logprobs, outside_mass
from jaxalign.feedback.text_generator import Completion, Counted, TextGenerator
from jaxalign.feedback.writer import RequestWriter, Written, choose_set
from jaxalign.models.model import Model, Params
from jaxalign.records import Exemplar
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.offload import FrozenRole


class _OptionLogprobs(NamedTuple):
    """The judge's answer to one comparison or rating. logprobs: of each option, float32 [O]; None if there is a problem."""

    logprobs: np.ndarray | None
    outside: float | None = None
    reasoning: str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class LocalJudge:
    """A `Judge` that reads probabilities from its own model.

    Attributes:
      generator: the model with its tokenizer.
      writer: writes the requests for this model.
      writing: sampling settings for critiques and revisions; None if they are never requested.
      reasoning: sampling settings for the reasoning before a verdict or rating; None for no reasoning.
      max_outside: the largest probability outside of the options with which a verdict or rating still counts.
      role: the model's weights, if they are offloaded between calls; `generator.params` is then None. See `loaded`.
    """

    generator: TextGenerator
    writer: RequestWriter
    writing: Sampling | None = None
    reasoning: Sampling | None = None
    max_outside: float = 1.0
    role: FrozenRole | None = None
    name = "local"

    @contextlib.contextmanager
    def loaded(self) -> Iterator[LocalJudge]:
        """A context with this judge's weights on the devices."""
        if self.role is None:
            yield self
            return
        with self.role.on_device() as params:
            yield dataclasses.replace(self, generator=dataclasses.replace(self.generator, params=params), role=None)

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> list[Verdict]:
        """The probability of the first option, normalised over all options; a tie counts one half."""
        results = self._read("comparison", requests, draw)
        read = [i for i, result in enumerate(results) if result.logprobs is not None]
        options = np.asarray([results[i].logprobs for i in read], np.float32).reshape(-1, 3 if self.writer.ties else 2)
        first, tie = labels.option_label(*options.T), dict.fromkeys(read)
        if self.writer.ties:
            tie = dict(zip(read, np.asarray(labels.tie_share(*options.T)).tolist(), strict=True))
        first = dict(zip(read, np.asarray(first).tolist(), strict=True))
        return [
            Verdict(first.get(i), result.reasoning, result.problem, result.outside, result.notes, tie=tie.get(i))
            for i, result in enumerate(results)
        ]

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> list[Rating]:
        """The expectation over the ratings 1 to 10, normalised over all ratings."""
        results = self._read("rating", requests, draw)
        read = [i for i, result in enumerate(results) if result.logprobs is not None]
        logprobs = np.asarray([results[i].logprobs for i in read], np.float32).reshape(-1, 10)
        scores = dict(zip(read, np.asarray(labels.expected_score(logprobs)).tolist(), strict=True))
        return [
            Rating(scores.get(i), result.reasoning, result.problem, result.outside, result.notes)
            for i, result in enumerate(results)
        ]

    def _texts(self, kind: str, requests: Sequence[Any], draw: Draw) -> list[Text]:
        if self.writing is None:
            raise UserError("the judge has no sampling settings for critiques and revisions; pass `writing` to LocalJudge")
        written = self._written(kind, requests, [{}] * len(requests), self.writing.max_new_tokens)
        completions, out = self._generate(written, draw, self.writing), []
        for request, completion in zip(written, completions, strict=True):
            if completion is None:
                out.append(Text("", False, request))
                continue
            cleaned = self.writer.contract.clean(completion.text, completion.ended)
            problem = None if completion.finite else "not_finite"
            if problem is None and self.writer.contract.declines(cleaned.text, kind):
                problem = "refused"
            out.append(Text(cleaned.text, cleaned.complete, problem, cleaned.reasoning, request.notes + cleaned.notes))
        return out

    critique = functools.partialmethod(_texts, "critique")
    revise = functools.partialmethod(_texts, "revision")

    def _read(self, kind: str, requests: Sequence[Any], draw: Draw) -> list[_OptionLogprobs]:
        """The options' log-probabilities after each request, or the reason why there are none."""
        options, out = self.writer.options(kind), [_OptionLogprobs(None)] * len(requests)
        values: list[dict[str, Any]] = [{}] * len(requests)
        if self.reasoning is not None:
            written = self._written(kind, requests, [{"reasoning": True}] * len(requests), self.reasoning.max_new_tokens)
            completions = self._generate(written, draw, self.reasoning)
            out = [self._thoughts(kind, *pair) for pair in zip(written, completions, strict=True)]
            values = [{"reasoning": True, "thoughts": result.reasoning} for result in out]
        asked = [i for i, result in enumerate(out) if result.problem is None]
        written = self._written(kind, [requests[i] for i in asked], [values[i] for i in asked], options.longest)
        for i, request in zip(asked, written, strict=True):
            notes = out[i].notes + (request.notes if isinstance(request, Written) else ())
            out[i] = out[i]._replace(problem=request if isinstance(request, str) else None, notes=tuple(dict.fromkeys(notes)))
        fitting = [(i, request.ids) for i, request in zip(asked, written, strict=True) if isinstance(request, Written)]
        logprobs = option_logprobs(self.generator, [ids for _, ids in fitting], options)
        for (i, _), row, outside in zip(fitting, logprobs, outside_mass(logprobs).tolist(), strict=True):
            if np.isnan(row).any() or not np.isfinite(row).any():
                out[i] = out[i]._replace(problem="not_finite")
            elif outside > self.max_outside:
                out[i] = out[i]._replace(problem="unreadable", outside=outside)
            else:
                out[i] = out[i]._replace(logprobs=row, outside=outside)
        return out

    def _thoughts(self, kind: str, request: Written | str, completion: Completion | None) -> _OptionLogprobs:
        """The reasoning before a verdict."""
        if completion is None:
            return _OptionLogprobs(None, problem=request)
        contract = self.writer.contract
        text, decided = contract.before_verdict(completion.text, kind)
        if not completion.finite:
            return _OptionLogprobs(None, reasoning=text, problem="not_finite", notes=request.notes)
        cleaned = contract.clean(text, completion.ended or decided)
        problem = "refused" if contract.declines(cleaned.text, "verdict") else None if cleaned.complete else "cut_off"
        # The judge reads its own thoughts again with their delimiters.
        kept, notes = (text, ()) if cleaned.reasoning is not None else (cleaned.text, cleaned.notes)
        return _OptionLogprobs(None, reasoning=kept, problem=problem, notes=request.notes + notes)

    def _written(
        self, kind: str, requests: Sequence[Any], values: Sequence[Mapping[str, Any]], new_tokens: int
    ) -> list[Written | str]:
        """Each request as token ids, or the name of the problem that prevents it. values: further variables of the template."""
        out: list[Written | str] = []
        for request, further in zip(requests, values, strict=True):
            variables = template_values(request) | further
            try:
                written = self.writer.write(kind, request.messages, request.principle, new_tokens, **variables)
                out.append("too_long" if written is None else written)
            except DialogueRefused:
                out.append("template")
        return out

    def _generate(self, written: Sequence[Written | str], draw: Draw, sampling: Sampling) -> list[Completion | None]:
        """The judge's text after each request; None after a request with a problem."""
        asked = [i for i, request in enumerate(written) if isinstance(request, Written)]
        rows = [draw.rows[i] for i in asked]
        generated = self.generator.generate([written[i].ids for i in asked], draw.key, sampling, rows)
        completions = dict(zip(asked, generated, strict=True))
        return [completions.get(i) for i in range(len(written))]


def make_writer(
    tokenizer: Tokenizer, settings: FeedbackConfig, max_length: int, exemplars: Sequence[Exemplar] = ()
) -> RequestWriter:
    """The writer of the requests to a local judge. The arguments are those of `make_local_judge`.

    Raises:
      UserError: feedback.thinking is set, but the judge's chat template does not read it or is not used; or feedback.ties is
        set, but the template set has no tie.
    """
    templates, thinking = choose_set(settings.templates, tokenizer), settings.thinking
    if thinking != "auto" and (templates.layout != "chat" or THINKING not in (tokenizer.files.chat_template or "")):
        reason = (f"the template set {templates.name!r} does not use the judge's chat template" if templates.layout != "chat"
                  else f"the judge in {tokenizer.files.folder} has no chat template that reads {THINKING}")
        raise UserError(f"feedback.thinking is {thinking!r}, but {reason}; leave it at 'auto'")
    tokenizer, has_tie = tokenizer.with_variables(thinking_variables(thinking)), bool(templates.form.get("tie"))
    if settings.ties and not has_tie:
        raise UserError(f"feedback.ties is True, but form.json of the template set {templates.name!r} has no \"tie\"; "
                        "add it, or set feedback.ties to None")
    shown = tuple(exemplars or templates.own_exemplars)[: templates.exemplars]
    return RequestWriter(templates, tokenizer, max_length, shown, has_tie if settings.ties is None else settings.ties)


def make_local_judge(
    model: Model, params: Params | None, tokenizer: Tokenizer, settings: FeedbackConfig, max_length: int, batch: int,
    exemplars: Sequence[Exemplar] = (), writing: Sampling | None = None, counted: Counted | None = None,
    role: FrozenRole | None = None,
) -> LocalJudge:
    """The local judge that `settings` describes, with a language model.

    Args:
      model: the model's architecture.
      params: its weights; None if `role` holds them.
      tokenizer: its tokenizer.
      settings: the templates, the reasoning, and the limit of the outside mass.
      max_length: the maximum length of a request with the judge's text, in tokens.
      batch: the maximum number of rows to compute together.
      exemplars: the constitution's examples; if there are none, those of the template set.
      writing: sampling settings of critiques and revisions, except for the ids that end them.
      counted: receives the model's work.
      role: see `LocalJudge`.
    """
    writer = make_writer(tokenizer, settings, max_length, exemplars)
    stops, reasoning = writer.stop_ids, None
    if settings.reasoning:
        reasoning = Sampling(settings.max_reasoning_tokens, stops, settings.reasoning_temperature)
    writing = writing and dataclasses.replace(writing, stop_ids=stops)
    engine = Engine(model, batch, max_length, share_prefix=settings.share_prefix)
    generator = TextGenerator(engine, params, tokenizer, counted)
    return LocalJudge(generator, writer, writing, reasoning, settings.max_outside_mass, role)
