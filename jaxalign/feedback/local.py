"""The local judge: a language model in this process that reads requests through a template set."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxalign.algorithms import labels
from jaxalign.config import Feedback
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.tokenizers.files import THINKING, thinking_variables
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.judge import (
    ComparisonRequest,
    CritiqueRequest,
    Draw,
    Rating,
    RatingRequest,
    RevisionRequest,
    Text,
    Verdict,
)
from jaxalign.feedback.options import option_logprobs, outside_mass
from jaxalign.feedback.speaker import Counted, Speaker, Utterance
from jaxalign.feedback.writer import RequestWriter, Written, choose_set
from jaxalign.models.model import Model, Params
from jaxalign.records import Exemplar
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.training.offload import FrozenRole


class _Reading(NamedTuple):
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
      speaker: the model with its tokenizer.
      writer: writes the requests for this model.
      writing: sampling settings for critiques and revisions; None if they are never requested.
      reasoning: sampling settings for the reasoning before a verdict or rating; None for no reasoning.
      max_outside: the largest probability outside of the options with which a verdict or rating still counts.
      role: the model's weights, if they are offloaded between calls; `speaker.params` is then None. See `loaded`.
    """

    speaker: Speaker
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
            yield dataclasses.replace(self, speaker=dataclasses.replace(self.speaker, params=params), role=None)

    def critique(self, requests: Sequence[CritiqueRequest], draw: Draw) -> list[Text]:
        """Samples critiques."""
        return self._texts("critique", requests, [{"response": r.response} for r in requests], draw)

    def revise(self, requests: Sequence[RevisionRequest], draw: Draw) -> list[Text]:
        """Samples revisions."""
        return self._texts("revision", requests, [{"response": r.response, "critique": r.critique} for r in requests], draw)

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> list[Verdict]:
        """The probability of the first option, normalised over all options; a tie counts one half."""
        found = self._read("comparison", requests, [{"first": r.first, "second": r.second} for r in requests], draw)
        read = [i for i, reading in enumerate(found) if reading.logprobs is not None]
        options = np.asarray([found[i].logprobs for i in read], np.float32).reshape(-1, 3 if self.writer.ties else 2)
        first, tie = labels.option_label(*options.T), dict.fromkeys(read)
        if self.writer.ties:
            tie = dict(zip(read, np.asarray(labels.tie_share(*options.T)).tolist(), strict=True))
        first = dict(zip(read, np.asarray(first).tolist(), strict=True))
        return [
            Verdict(first.get(i), x.reasoning, x.problem, x.outside, x.notes, tie=tie.get(i)) for i, x in enumerate(found)
        ]

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> list[Rating]:
        """The expectation over the ratings 1 to 10, normalised over all ratings."""
        found = self._read("rating", requests, [{"response": r.response} for r in requests], draw)
        read = [i for i, reading in enumerate(found) if reading.logprobs is not None]
        scores = np.asarray(labels.expected_score(np.asarray([found[i].logprobs for i in read], np.float32).reshape(-1, 10)))
        rated = dict(zip(read, scores.tolist(), strict=True))
        return [Rating(rated.get(i), x.reasoning, x.problem, x.outside, x.notes) for i, x in enumerate(found)]

    def _texts(self, kind: str, requests: Sequence[Any], values: Sequence[Mapping[str, Any]], draw: Draw) -> list[Text]:
        if self.writing is None:
            raise UserError("the judge has no sampling settings for critiques and revisions; pass `writing` to LocalJudge")
        written = self._written(kind, requests, values, self.writing.max_new_tokens)
        said, out = self._say(written, draw, self.writing), []
        for request, utterance in zip(written, said, strict=True):
            if utterance is None:
                out.append(Text("", False, request))
                continue
            cleaned = self.writer.contract.clean(utterance.text, utterance.ended)
            problem = None if utterance.finite else "not_finite"
            if problem is None and self.writer.contract.declines(cleaned.text, kind):
                problem = "refused"
            out.append(Text(cleaned.text, cleaned.complete, problem, cleaned.reasoning, request.notes + cleaned.notes))
        return out

    def _read(self, kind: str, requests: Sequence[Any], values: Sequence[Mapping[str, Any]], draw: Draw) -> list[_Reading]:
        """The options' log-probabilities after each request, or the reason why there are none."""
        options, out = self.writer.options(kind), [_Reading(None)] * len(requests)
        if self.reasoning is not None:
            written = self._written(kind, requests, [{**v, "reasoning": True} for v in values], self.reasoning.max_new_tokens)
            said = self._say(written, draw, self.reasoning)
            out = [self._thoughts(kind, *pair) for pair in zip(written, said, strict=True)]
            values = [{**v, "reasoning": True, "thoughts": x.reasoning} for v, x in zip(values, out, strict=True)]
        asked = [i for i, reading in enumerate(out) if reading.problem is None]
        written = self._written(kind, [requests[i] for i in asked], [values[i] for i in asked], options.longest)
        for i, request in zip(asked, written, strict=True):
            notes = out[i].notes + (request.notes if isinstance(request, Written) else ())
            out[i] = out[i]._replace(problem=request if isinstance(request, str) else None, notes=tuple(dict.fromkeys(notes)))
        fitting = [(i, request.ids) for i, request in zip(asked, written, strict=True) if isinstance(request, Written)]
        logprobs = option_logprobs(self.speaker, [ids for _, ids in fitting], options)
        for (i, _), row, outside in zip(fitting, logprobs, outside_mass(logprobs).tolist(), strict=True):
            if np.isnan(row).any() or not np.isfinite(row).any():
                out[i] = out[i]._replace(problem="not_finite")
            elif outside > self.max_outside:
                out[i] = out[i]._replace(problem="unreadable", outside=outside)
            else:
                out[i] = out[i]._replace(logprobs=row, outside=outside)
        return out

    def _thoughts(self, kind: str, request: Written | str, said: Utterance | None) -> _Reading:
        """The reasoning before a verdict."""
        if said is None:
            return _Reading(None, problem=request)
        contract = self.writer.contract
        text, decided = contract.before_verdict(said.text, kind)
        if not said.finite:
            return _Reading(None, reasoning=text, problem="not_finite", notes=request.notes)
        cleaned = contract.clean(text, said.ended or decided)
        problem = "refused" if contract.declines(cleaned.text, "verdict") else None if cleaned.complete else "cut_off"
        # The judge reads its own thoughts again with their delimiters.
        kept, notes = (text, ()) if cleaned.reasoning is not None else (cleaned.text, cleaned.notes)
        return _Reading(None, reasoning=kept, problem=problem, notes=request.notes + notes)

    def _written(
        self, kind: str, requests: Sequence[Any], values: Sequence[Mapping[str, Any]], new_tokens: int
    ) -> list[Written | str]:
        """Each request as token ids, or the name of the problem that prevents it."""
        out: list[Written | str] = []
        for request, own in zip(requests, values, strict=True):
            try:
                written = self.writer.write(kind, request.messages, request.principle, new_tokens, **own)
                out.append("too_long" if written is None else written)
            except DialogueRefused:
                out.append("template")
        return out

    def _say(self, written: Sequence[Written | str], draw: Draw, sampling: Sampling) -> list[Utterance | None]:
        """The judge's text after each request; None after a request with a problem."""
        asked = [i for i, request in enumerate(written) if isinstance(request, Written)]
        rows = [draw.rows[i] for i in asked]
        said = self.speaker.say_ids([written[i].ids for i in asked], draw.key, sampling, rows)
        found = dict(zip(asked, said, strict=True))
        return [found.get(i) for i in range(len(written))]


def make_writer(
    tokenizer: Tokenizer, settings: Feedback, max_length: int, exemplars: Sequence[Exemplar] = ()
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
    model: Model, params: Params | None, tokenizer: Tokenizer, settings: Feedback, max_length: int, batch: int,
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
    speaker = Speaker(engine, params, tokenizer, counted)
    return LocalJudge(speaker, writer, writing, reasoning, settings.max_outside_mass, role)
