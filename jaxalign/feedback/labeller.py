"""AI preference labels from any judge: draws principles per row and averages both orders (arXiv 2212.08073, 2309.00267)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms import labels
from jaxalign.config import Feedback
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.critique import draw_principles
from jaxalign.feedback.judge import ComparisonRequest, Draw, Verdict
from jaxalign.records import Comparison, Principle, Prompt


class Pair(NamedTuple):
    """Two responses to one prompt."""

    prompt: Prompt
    response_a: str
    response_b: str


@dataclasses.dataclass(frozen=True)
class Labeller:
    """Labels pairs under a constitution.

    Attributes:
      judge: any `Judge`, wrapped in `CheckedJudge`.
      constitution: the principles to draw from.
      config: the number of principles per pair, the margin of undecided labels, and the bounds for clamping. `config.invert` is
        not read: callers pass `invert` to `label`, so that evaluation never inverts.
      seed: determines which principles are drawn.
    """

    judge: CheckedJudge
    constitution: tuple[Principle, ...]
    config: Feedback
    seed: int

    def label(self, pairs: Sequence[Pair], key: jax.Array, first_row: int, invert: bool = False) -> list[Comparison]:
        """Labels each pair.

        The judge compares the responses in both orders, under each principle drawn for the row. A pair is undecided, with the
        label 0.5, if the average is within `undecided_margin` of 0.5 or if no principle has a verdict in both orders. Equal
        responses are undecided without asking the judge.

        Args:
          pairs: B pairs, whose global rows are first_row + i.
          key: the PRNG key of the judge's reasoning.
          first_row: the global row of the first pair.
          invert: whether to invert the labels.

        Returns:
          B comparisons, in order.
        """
        count = self.config.principles_per_comparison
        rows = range(first_row, first_row + len(pairs))
        drawn = draw_principles(self.constitution, rows, count, self.seed, streams.PRINCIPLES["labels"])
        asked = [
            (pair, rules[k], (first_row + i) * count + k)
            for i, (pair, rules) in enumerate(zip(pairs, drawn, strict=True))
            for k in range(count)
            if pair.response_a != pair.response_b
        ]
        numbers = [number for _, _, number in asked]
        forward = [ComparisonRequest(p.prompt.messages, p.response_a, p.response_b, rule) for p, rule, _ in asked]
        backward = [ComparisonRequest(p.prompt.messages, p.response_b, p.response_a, rule) for p, rule, _ in asked]
        with self.judge.loaded() as judge:
            verdicts = [
                judge.compare(requests, Draw(jax.random.fold_in(key, order), numbers))
                for order, requests in enumerate((forward, backward))
            ]
        judged, out = iter(zip(*verdicts, strict=True)), []
        for pair, rules in zip(pairs, drawn, strict=True):
            both = [] if pair.response_a == pair.response_b else [next(judged) for _ in rules]
            out.append(self._comparison(pair, rules, both, invert))
        return out

    def _comparison(
        self, pair: Pair, rules: Sequence[Principle], verdicts: Sequence[tuple[Verdict, Verdict]], invert: bool
    ) -> Comparison:
        """verdicts: (with response_a first, with response_b first) under each principle."""
        config = self.config
        both = [
            (ab.probability, 1.0 - ba.probability)
            for ab, ba in verdicts
            if ab.probability is not None and ba.probability is not None
        ]
        ab, ba = (float(np.mean(side)) for side in zip(*both, strict=True)) if both else (None, None)
        label = float(labels.average_orders(ab, ba)) if both else 0.5
        decided = bool(both) and not bool(labels.is_undecided(label, config.undecided_margin))
        if not decided:
            label = 0.5
        if config.reasoning:
            label = float(labels.clamp_label(label, config.clamp_low, config.clamp_high))
        if invert:
            label = float(labels.invert_label(label))
        reasonings = (verdicts[0][0].reasoning, verdicts[0][1].reasoning) if verdicts else (None, None)
        names = tuple(rule.name for rule in rules)
        return Comparison(pair.prompt, pair.response_a, pair.response_b, label, names, ab, ba, decided, *reasonings)
