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
    """Two responses to one prompt. missing: whether one of them could not be sampled; both are then empty."""

    prompt: Prompt
    response_a: str
    response_b: str
    missing: bool = False


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
          B comparisons, in order. A pair without a verdict has a `problem`.
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
        each = [verdict for pair in verdicts for verdict in pair]
        problem = None if both else next((verdict.problem or "none" for verdict in each if verdict.probability is None), None)
        problem = "missing_answer" if pair.missing else problem
        outside = [verdict.outside for verdict in each if verdict.outside is not None]
        apart = [verdict.disagreement for verdict in each if verdict.disagreement is not None]
        return Comparison(
            prompt=pair.prompt,
            response_a=pair.response_a,
            response_b=pair.response_b,
            label=label,
            principles=tuple(rule.name for rule in rules),
            label_ab=ab,
            label_ba=ba,
            decided=decided,
            reasoning_ab=each[0].reasoning if each else None,
            reasoning_ba=each[1].reasoning if each else None,
            problem=problem,
            outside=float(np.mean(outside)) if outside else None,
            notes=tuple(dict.fromkeys(note for verdict in each for note in verdict.notes)),
            disagreement=max(apart) if apart else None,
        )
