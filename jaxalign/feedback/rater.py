"""Direct AI feedback: the feedback model's expected rating of one answer, from 1 to 10 (Lee et al. 2023, arXiv 2309.00267)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms import labels
from jaxalign.config import Feedback
from jaxalign.data.chat.formats import END, RATINGS, render_rating, render_rating_verdict
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.speaker import Speaker
from jaxalign.records import Principle, Prompt
from jaxalign.rollout.sampling import Sampling

Ids = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rater:
    """Rates answers under a constitution, `principles` drawn for each. Of `config` the reasoning and its limits are read."""

    speaker: Speaker
    constitution: tuple[Principle, ...]
    config: Feedback
    principles: int
    seed: int

    def rate(self, prompts: Sequence[Prompt], responses: Sequence[str], key: jax.Array, first_row: int) -> np.ndarray:
        """float32 [B]: the expected rating in 1..10, averaged over the principles drawn for the row first_row + i.

        NaN where no principle gave one: the reasoning was cut before its end, or the dialogue is too long for it.
        """
        count = self.principles
        rows = range(first_row, first_row + len(prompts))
        drawn = draw_principles(self.constitution, rows, count, self.seed, streams.PRINCIPLES["ratings"])
        asked = [
            (prompt, response, rule)
            for prompt, response, rules in zip(prompts, responses, drawn, strict=True) for rule in rules
        ]  # fmt: skip
        ratings = self._expected(self._segments(asked, key, first_row * count)).reshape(len(prompts), count)
        rated = np.isfinite(ratings)
        total = np.sum(np.where(rated, ratings, 0), axis=1)
        return np.where(rated.any(axis=1), total / np.maximum(rated.sum(axis=1), 1), np.nan).astype(np.float32)

    def _segments(self, asked, key: jax.Array, first_row: int) -> list[list[str] | None]:
        """What stands before each rating; None where the reasoning did not end."""
        if not self.config.reasoning:
            return [render_rating(p.messages, text, rule, reasoning=False) for p, text, rule in asked]
        sampling = Sampling(
            self.config.max_reasoning_tokens, (self.speaker.tokenizer.eos_id,), self.config.reasoning_temperature
        )
        requests = [render_rating(p.messages, text, rule) for p, text, rule in asked]
        thoughts = self.speaker.say(requests, key, sampling, range(first_row, first_row + len(asked)))
        return [
            render_rating_verdict(p.messages, text, rule, thought.text) if thought.ended else None
            for (p, text, rule), thought in zip(asked, thoughts, strict=True)
        ]

    def _expected(self, segments: Sequence[list[str] | None]) -> np.ndarray:
        prompts = [None if s is None else self.speaker.prompt_ids(s) for s in segments]
        options = [tuple(self.speaker.tokenizer.encode_segments([rating])) for rating in RATINGS]
        longest = max(len(option) for option in options)
        fitting = [i for i, ids in enumerate(prompts) if ids is not None and self.speaker.fits(ids, longest)]
        out = np.full(len(segments), np.nan, np.float32)
        if fitting:
            end = self.speaker.tokenizer.encode_segments([END])[0]
            logprobs = text_logprobs(self.speaker, [prompts[i] for i in fitting], options, end)
            out[fitting] = np.asarray(labels.expected_score(logprobs))
        return out


def text_logprobs(speaker: Speaker, prompts: Sequence[Sequence[int]], options: Sequence[Ids], end: int) -> np.ndarray:
    """float32 [B, O]: the log-probability that each option's ids come next.

    Options may have several ids and one may begin another ("1" and "10"): the shorter then counts with the probability that
    `end` follows it. The options are walked as a tree, one forward pass a node with children, not one an option.
    """
    nodes: dict[Ids, dict[int, None]] = {}
    for option in options:
        for depth, token in enumerate(option):
            nodes.setdefault(option[:depth], {})[token] = None
    for option in options:
        if option in nodes:
            nodes[option][end] = None
    steps = {}
    for prefix, children in nodes.items():
        found = speaker.next_logprobs([[*prompt, *prefix] for prompt in prompts], np.asarray(list(children), np.int32))
        steps |= {(*prefix, token): found[:, k] for k, token in enumerate(children)}

    def total(option: Ids) -> np.ndarray:
        path = (*option, end) if option in nodes else option
        return np.sum([steps[path[: depth + 1]] for depth in range(len(path))], axis=0)

    return np.stack([total(option) for option in options], axis=1)
