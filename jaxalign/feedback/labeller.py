"""AI preference labels: the feedback model's own option probabilities, both orders averaged (arXiv 2212.08073, 2309.00267)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms import labels
from jaxalign.config import Feedback
from jaxalign.data.chat.formats import OPTIONS, render_comparison, render_verdict
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.speaker import Speaker
from jaxalign.records import Comparison, Principle, Prompt
from jaxalign.rollout.sampling import Sampling


class Pair(NamedTuple):
    """Two answers to one prompt."""

    prompt: Prompt
    response_a: str
    response_b: str


class _Judgement(NamedTuple):
    """One order's answer: P(first shown) or None where the reasoning was cut short, and the reasoning."""

    first: float | None
    reasoning: str | None


@dataclasses.dataclass(frozen=True)
class Labeller:
    """Labels pairs under a constitution. `seed` drives which principles are drawn; config.invert is the caller's to apply
    (`label(..., invert)`), so that evaluation never inverts."""

    speaker: Speaker
    constitution: tuple[Principle, ...]
    config: Feedback
    seed: int

    def label(self, pairs: Sequence[Pair], key: jax.Array, first_row: int, invert: bool = False) -> list[Comparison]:
        """A comparison for each pair, in order; row numbers are first_row + i. Undecided ones are marked, not dropped."""
        count = self.config.principles_per_comparison
        rows = range(first_row, first_row + len(pairs))
        drawn = draw_principles(self.constitution, rows, count, self.seed, streams.PRINCIPLES["labels"])
        # Two equal answers need no judge: nothing is asked, and the pair is undecided. All others keep their row numbers.
        asked = [
            (pair, rules[k], (first_row + i) * count + k)
            for i, (pair, rules) in enumerate(zip(pairs, drawn, strict=True)) for k in range(count)
            if pair.response_a != pair.response_b
        ]  # fmt: skip
        numbers = [number for _, _, number in asked]
        forward = self._judge([(p.prompt, p.response_a, p.response_b, rule) for p, rule, _ in asked], key, 0, numbers)
        backward = self._judge([(p.prompt, p.response_b, p.response_a, rule) for p, rule, _ in asked], key, 1, numbers)
        judged, out = iter(zip(forward, backward, strict=True)), []
        for pair, rules in zip(pairs, drawn, strict=True):
            same = pair.response_a == pair.response_b
            both = [] if same else [next(judged) for _ in rules]
            out.append(self._comparison(pair, rules, [f for f, _ in both], [b for _, b in both], invert))
        return out

    def _judge(self, asked, key: jax.Array, order: int, numbers: Sequence[int]) -> list[_Judgement]:
        """Judgements of (prompt, first, second, principle), in the order shown; numbers: their global row numbers."""
        reasonings = [None] * len(asked)
        if self.config.reasoning:
            prompts = [render_comparison(p.messages, a, b, rule, reasoning=True) for p, a, b, rule in asked]
            sampling = Sampling(
                self.config.max_reasoning_tokens, (self.speaker.tokenizer.eos_id,), self.config.reasoning_temperature
            )
            reasonings = self.speaker.say(prompts, jax.random.fold_in(key, order), sampling, numbers)
        parsed = [i for i, thought in enumerate(reasonings) if thought is None or thought.ended]
        segments = []
        for i in parsed:
            (prompt, a, b, rule), thought = asked[i], reasonings[i]
            if thought is None:
                segments.append(render_comparison(prompt.messages, a, b, rule, reasoning=False))
            else:
                segments.append(render_verdict(prompt.messages, a, b, rule, thought.text))
        first = dict(zip(parsed, self._first_probabilities(segments), strict=True))  # None where it does not fit
        return [_Judgement(first.get(i), thought.text if thought else None) for i, thought in enumerate(reasonings)]

    def _first_probabilities(self, segments) -> list[float | None]:
        """P(the first shown) for each verdict prompt, normalised over the two options; None where it is too long, or logits
        are not finite."""
        speaker = self.speaker
        options = np.asarray([speaker.tokenizer.marker_id(option) for option in OPTIONS], np.int32)
        prompts = [speaker.prompt_ids(s) for s in segments]
        fitting = [i for i, prompt in enumerate(prompts) if speaker.fits(prompt, 1)]
        out: list[float | None] = [None] * len(prompts)
        logprobs = speaker.next_logprobs([prompts[i] for i in fitting], options)
        probability = np.asarray(labels.option_label(logprobs[:, 0], logprobs[:, 1]))
        for i, value in zip(fitting, probability, strict=True):
            out[i] = float(value) if np.isfinite(value) else None
        return out

    def _comparison(self, pair: Pair, rules, forward, backward, invert: bool) -> Comparison:
        config = self.config
        both = [(f.first, 1.0 - b.first) for f, b in zip(forward, backward, strict=True)
                if f.first is not None and b.first is not None]  # fmt: skip
        ab, ba = (float(np.mean(side)) for side in zip(*both, strict=True)) if both else (None, None)
        label = float(labels.average_orders(ab, ba)) if both else 0.5
        decided = bool(both) and not bool(labels.is_undecided(label, config.undecided_margin))
        if not decided:
            label = 0.5
        if config.reasoning:
            label = float(labels.clamp_label(label, config.clamp_low, config.clamp_high))
        if invert:
            label = float(labels.invert_label(label))
        return Comparison(
            pair.prompt, pair.response_a, pair.response_b, label, tuple(rule.name for rule in rules), ab, ba, decided,
            forward[0].reasoning if forward else None, backward[0].reasoning if backward else None,
        )  # fmt: skip
