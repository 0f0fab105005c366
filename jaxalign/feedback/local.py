"""The local judge: a language model in this process that understands this project's markers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxalign.algorithms import labels
from jaxalign.data.chat.formats import (
    END,
    OPTIONS,
    RATINGS,
    render_comparison,
    render_critique,
    render_rating,
    render_rating_verdict,
    render_revision,
    render_verdict,
)
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
from jaxalign.feedback.options import text_logprobs
from jaxalign.feedback.speaker import Speaker, Utterance
from jaxalign.rollout.sampling import Sampling
from jaxalign.training.offload import FrozenRole


@dataclasses.dataclass(frozen=True)
class LocalJudge:
    """A `Judge` that reads probabilities from its own model.

    Attributes:
      speaker: the model with its tokenizer, which has the markers of `jaxalign.data.chat.formats`.
      writing: sampling settings for critiques and revisions; None if they are never requested.
      reasoning: sampling settings for the reasoning before a verdict or rating; None for no reasoning.
      role: the model's weights, if they are offloaded between calls; `speaker.params` is then None. See `loaded`.
    """

    speaker: Speaker
    writing: Sampling | None = None
    reasoning: Sampling | None = None
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
        return self._write([render_critique(r.messages, r.response, r.principle) for r in requests], draw)

    def revise(self, requests: Sequence[RevisionRequest], draw: Draw) -> list[Text]:
        """Samples revisions."""
        return self._write([render_revision(r.messages, r.response, r.principle, r.critique) for r in requests], draw)

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> list[Verdict]:
        """The probability of option (A), normalised over both options.

        None if the reasoning was cut off, the dialogue is too long for the model, or logits are not finite.
        """
        if self.reasoning is None:
            thoughts: list[Utterance | None] = [None] * len(requests)
            segments = [render_comparison(r.messages, r.first, r.second, r.principle, reasoning=False) for r in requests]
        else:
            asked = [render_comparison(r.messages, r.first, r.second, r.principle, reasoning=True) for r in requests]
            thoughts = self.speaker.say(asked, draw.key, self.reasoning, draw.rows)
            segments = [
                render_verdict(r.messages, r.first, r.second, r.principle, thought.text) if thought.ended else None
                for r, thought in zip(requests, thoughts, strict=True)
            ]
        read = [i for i, found in enumerate(segments) if found is not None]
        first = dict(zip(read, self.first_probabilities([segments[i] for i in read]), strict=True))
        return [Verdict(first.get(i), thought.text if thought else None) for i, thought in enumerate(thoughts)]

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> list[Rating]:
        """The expectation over the ratings 1 to 10; None in the same cases as in `compare`."""
        if self.reasoning is None:
            thoughts: list[Utterance | None] = [None] * len(requests)
            segments = [render_rating(r.messages, r.response, r.principle, reasoning=False) for r in requests]
        else:
            asked = [render_rating(r.messages, r.response, r.principle) for r in requests]
            thoughts = self.speaker.say(asked, draw.key, self.reasoning, draw.rows)
            segments = [
                render_rating_verdict(r.messages, r.response, r.principle, thought.text) if thought.ended else None
                for r, thought in zip(requests, thoughts, strict=True)
            ]
        return [
            Rating(float(value) if np.isfinite(value) else None, thought.text if thought else None)
            for value, thought in zip(self.expected_ratings(segments), thoughts, strict=True)
        ]

    def first_probabilities(self, segments: Sequence[Sequence[str]]) -> list[float | None]:
        """P(the first response shown is better) after each verdict prompt; None if the prompt is too long or logits are not
        finite."""
        speaker = self.speaker
        options = np.asarray([speaker.tokenizer.marker_id(option) for option in OPTIONS], np.int32)
        prompts = [speaker.prompt_ids(found) for found in segments]
        fitting = [i for i, prompt in enumerate(prompts) if speaker.fits(prompt, 1)]
        out: list[float | None] = [None] * len(prompts)
        logprobs = speaker.next_logprobs([prompts[i] for i in fitting], options)
        probability = np.asarray(labels.option_label(logprobs[:, 0], logprobs[:, 1]))
        for i, value in zip(fitting, probability, strict=True):
            out[i] = float(value) if np.isfinite(value) else None
        return out

    def expected_ratings(self, segments: Sequence[Sequence[str] | None]) -> np.ndarray:
        """float32 [B]: the expected rating after each prompt; NaN if the prompt is None or too long, or logits are not
        finite."""
        tokenizer = self.speaker.tokenizer
        prompts = [None if found is None else self.speaker.prompt_ids(found) for found in segments]
        options = [tuple(tokenizer.encode_segments([rating])) for rating in RATINGS]
        longest = max(len(option) for option in options)
        fitting = [i for i, ids in enumerate(prompts) if ids is not None and self.speaker.fits(ids, longest)]
        out = np.full(len(segments), np.nan, np.float32)
        if fitting:
            end = tokenizer.encode_segments([END])[0]
            logprobs = text_logprobs(self.speaker, [prompts[i] for i in fitting], options, end)
            out[fitting] = np.asarray(labels.expected_score(logprobs))
        return out

    def _write(self, segments: Sequence[Sequence[str]], draw: Draw) -> list[Text]:
        if self.writing is None:
            raise UserError("the judge has no sampling settings for critiques and revisions; pass `writing` to LocalJudge")
        return [Text(found.text, found.ended) for found in self.speaker.say(segments, draw.key, self.writing, draw.rows)]
