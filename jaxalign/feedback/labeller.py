"""AI preference labels from any judge: draws principles per row and asks in both orders (arXiv 2212.08073, 2309.00267); and the
choice of the two answers that are compared."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import FeedbackConfig
from jaxalign.feedback import decisions
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.critique import PolicyAnswer, draw_principles
from jaxalign.feedback.judge import ComparisonRequest, Draw, Verdict
from jaxalign.records import Comparison, Principle, PrincipleLabel, Prompt


class Pair(NamedTuple):
    """Two responses to one prompt.

    missing: whether one of them could not be sampled; both are then empty. incomplete: as in `Comparison`.
    """

    prompt: Prompt
    response_a: str
    response_b: str
    missing: bool = False
    incomplete: tuple[str, ...] = ()


def incomplete_sides(ended_a: bool, ended_b: bool) -> tuple[str, ...]:
    """`Comparison.incomplete` of two responses of which it is known whether they ended."""
    return tuple(side for side, ended in (("a", ended_a), ("b", ended_b)) if not ended)


class _Asked(NamedTuple):
    """A pair under one principle. row: its global row number among the requests."""

    pair: Pair
    rule: Principle
    row: int


@dataclasses.dataclass(frozen=True)
class Labeller:
    """Labels pairs under a constitution.

    Attributes:
      judge: any `Judge`, wrapped in `CheckedJudge`.
      constitution: the principles to draw from.
      config: the number of principles per pair, and how a label follows from the verdicts. `config.invert` is not read: callers
        pass `invert` to `label`, so that evaluation never inverts.
      seed: determines which principles are drawn.
    """

    judge: CheckedJudge
    constitution: tuple[Principle, ...]
    config: FeedbackConfig
    seed: int

    def label(self, pairs: Sequence[Pair], key: jax.Array, first_row: int, invert: bool = False) -> list[Comparison]:
        """Labels each pair.

        The judge compares the responses in both orders, under each principle drawn for the row. With
        `config.second_order="unless_tie"`, it is not asked again after a tie. Equal responses are undecided without asking the
        judge. The labels are decided with `decisions.fixed`; `decisions.decide` decides them again with another calibration.

        Args:
          pairs: B pairs, whose global rows are first_row + i.
          key: the PRNG key of the judge's reasoning.
          first_row: the global row of the first pair.
          invert: whether to invert the labels.

        Returns:
          B comparisons, in order. A pair without a verdict has a `problem`.
        """
        count = min(self.config.principles_per_comparison, len(self.constitution))
        rows = range(first_row, first_row + len(pairs))
        drawn = draw_principles(self.constitution, rows, count, self.seed, streams.PRINCIPLES["labels"])
        asked = [
            _Asked(pair, rules[k], (first_row + i) * count + k)
            for i, (pair, rules) in enumerate(zip(pairs, drawn, strict=True))
            for k in range(count)
            if pair.response_a != pair.response_b
        ]
        with self.judge.loaded() as judge:
            first = self._compare(judge, asked, jax.random.fold_in(key, 0), swapped=False)
            again = []
            for i, verdict in enumerate(first):
                is_tie = verdict.probability is not None and verdict.tie is not None and verdict.tie > 0.5
                if self.config.second_order == "always" or not is_tie:
                    again.append(i)
            swapped = self._compare(judge, [asked[i] for i in again], jax.random.fold_in(key, 1), swapped=True)
        second = dict(zip(again, swapped, strict=True))
        verdicts, out = iter([(verdict, second.get(i)) for i, verdict in enumerate(first)]), []
        calibration = decisions.fixed(self.config)
        for pair, rules in zip(pairs, drawn, strict=True):
            both = [] if pair.response_a == pair.response_b else [next(verdicts) for _ in rules]
            out.append(decisions.decide(_comparison(pair, rules, both), calibration, self.config, invert))
        return out

    def _compare(self, judge: CheckedJudge, asked: Sequence[_Asked], key: jax.Array, swapped: bool) -> list[Verdict]:
        """The verdicts in one order, averaged over `config.reasonings` samples of the judge's reasoning."""
        requests = []
        for pair, rule, _ in asked:
            shown = (pair.response_b, pair.response_a) if swapped else (pair.response_a, pair.response_b)
            requests.append(ComparisonRequest(pair.prompt.messages, *shown, rule))
        rows = [entry.row for entry in asked]
        keys = [key, *(jax.random.fold_in(key, number) for number in range(1, self.config.reasonings))]
        samples = [judge.compare(requests, Draw(own, rows)) for own in keys]
        return [_mean(each) for each in zip(*samples, strict=True)]


def _mean(verdicts: Sequence[Verdict]) -> Verdict:
    """The mean of several verdicts on one request, with the reasoning of the first one that has a probability."""
    usable = [verdict for verdict in verdicts if verdict.probability is not None]
    if len(verdicts) == 1 or not usable:
        return verdicts[0]
    notes = tuple(dict.fromkeys(note for verdict in verdicts for note in verdict.notes))
    means = {
        field: float(np.mean(values))
        for field in ("probability", "outside", "disagreement", "tie")
        if (values := _known(getattr(verdict, field) for verdict in usable))
    }
    return usable[0]._replace(notes=notes, **means)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _comparison(
    pair: Pair, rules: Sequence[Principle], verdicts: Sequence[tuple[Verdict, Verdict | None]]
) -> Comparison:
    """A pair with its verdicts, before it is decided. verdicts: under each principle, with response_a first and second; the
    latter is None if it was not asked."""
    each = [verdict for both in verdicts for verdict in both if verdict is not None]
    labels = tuple(_principle_label(rule, *both) for rule, both in zip(rules, verdicts, strict=False))
    problems = [problem for verdict in each if (problem := _problem(verdict)) is not None]
    problem = None if not problems or any(label.complete for label in labels) else problems[0]
    outside = _known(verdict.outside for verdict in each)
    apart = _known(verdict.disagreement for verdict in each)
    return Comparison(
        prompt=pair.prompt,
        response_a=pair.response_a,
        response_b=pair.response_b,
        label=0.5,
        principles=tuple(rule.name for rule in rules),
        decided=False,
        problem="missing_answer" if pair.missing else problem,
        outside=float(np.mean(outside)) if outside else None,
        notes=tuple(dict.fromkeys(note for verdict in each for note in verdict.notes)),
        disagreement=max(apart) if apart else None,
        labels=labels,
        incomplete=pair.incomplete,
    )


def _principle_label(rule: Principle, ab: Verdict, ba: Verdict | None) -> PrincipleLabel:
    ties = _known(verdict.tie for verdict in (ab, ba) if verdict is not None)
    return PrincipleLabel(
        principle=rule.name,
        ab=ab.probability,
        ba=None if ba is None or ba.probability is None else 1.0 - ba.probability,
        tie=float(np.mean(ties)) if ties else None,
        reasoning_ab=ab.reasoning,
        reasoning_ba=None if ba is None else ba.reasoning,
        problem_ab=_problem(ab),
        problem_ba=None if ba is None else _problem(ba),
    )


def _problem(verdict: Verdict) -> str | None:
    """Why a result has no verdict: a name in `reasons.PROBLEMS`; None if it has one."""
    return None if verdict.probability is not None else verdict.problem or "none"


def choose_pair(answers: Sequence[PolicyAnswer], how: str) -> tuple[int, int] | None:
    """The indices of two answers, in ascending order; equal answers are chosen only if all are equal.

    Args:
      answers: at least two answers to one prompt.
      how: "first": the first two that differ; "different": the two with the smallest Jaccard similarity of their words and
        pairs of neighbouring words; "uncertain": the two with the lowest mean log-probability per token. Among equals, the
        earliest pair.

    Returns:
      Two indices; None if fewer than two answers could be sampled.
    """
    sampled = [i for i, answer in enumerate(answers) if answer.sampled]
    if len(sampled) < 2:
        return None
    pairs = list(itertools.combinations(sampled, 2))
    differing = [pair for pair in pairs if answers[pair[0]].text != answers[pair[1]].text]
    if not differing:
        return pairs[0]
    if how == "different":
        parts = {}
        for i in sampled:
            words = answers[i].text.lower().split()
            parts[i] = {(word,) for word in words} | set(itertools.pairwise(words))
        similarity = {}
        for a, b in differing:
            union = parts[a] | parts[b]
            similarity[a, b] = len(parts[a] & parts[b]) / len(union) if union else 1.0
        return min(differing, key=similarity.get)
    if how == "uncertain":
        return min(differing, key=lambda pair: answers[pair[0]].mean_logprob + answers[pair[1]].mean_logprob)
    return differing[0]
