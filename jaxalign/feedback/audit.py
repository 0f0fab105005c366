"""Measures a judge on gold pairs: accuracy, agreement, position bias, length preference and calibration.

A gold pair has a better answer (chosen) and a worse one (rejected), or is a tie. The chosen answer is shown first or second at
random. Agreement by exact match alone flatters a judge that prefers a position, a length or a frequent outcome
(arXiv 2606.19544), so the audit also computes Cohen's kappa, the flip rate and the length coefficient.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxalign.algorithms import labels
from jaxalign.algorithms.calibration import expected_calibration_error
from jaxalign.algorithms.statistics import bootstrap_interval, cohen_kappa, logistic_coefficients, wilson_interval
from jaxalign.feedback.judge import Verdict

FIRST, SECOND, TIE = "first", "second", "tie"
"""The outcomes of a comparison: which of the answers shown is better."""


class Trial(NamedTuple):
    """One gold pair that a judge compared in both orders under one principle.

    pair: the index of the gold pair. gold: the correct outcome in the first order. lengths: the numbers of characters of the
    answers, in the first order. principle: its name. kind: the kind of the pair, if known. verdicts: in the first order, and
    with the answers swapped.
    """

    pair: int
    gold: str
    lengths: tuple[int, int]
    principle: str
    kind: str | None
    verdicts: tuple[Verdict, Verdict]


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of cases with its 95% Wilson interval. count may contain halves. rate: None if total is 0."""

    count: float
    total: int
    rate: float | None
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class AuditEstimate:
    """A number with its 95% bootstrap interval; None where it is undefined."""

    value: float | None
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class AuditPart:
    """The measures of a part of the pairs; see `Audit`."""

    pairs: int
    accuracy: Share
    flips: Share


@dataclasses.dataclass(frozen=True)
class Audit:
    """The measures of one judge.

    A pair's label is the mean of its probabilities over the principles and over both orders, as in `Labeller`. `outcome` turns
    it into an outcome. A pair is decided if the outcome is not a tie.

    Attributes:
      pairs: the number of gold pairs.
      ties: the number of gold pairs without a better answer.
      without_verdict: the number of pairs without a label.
      accuracy: how often the outcome is correct, among the decided pairs that have a better answer.
      accuracy_all: how often the outcome is correct, among all pairs; a pair without a label counts as wrong.
      kappa: Cohen's kappa of the outcomes and the gold outcomes (first, second, tie), over the pairs with a label.
      flips: how often the judge prefers the other answer after a swap, among the pairs that it decides in both orders.
      first_position: how often the judge prefers the answer shown first, among the same pairs; a pair that prefers it in one of
        its orders counts half.
      length_coefficient: the change of the log-odds of a preference if the answer is twice as long, at equal quality: the
        coefficient of a logistic regression of the outcome on log2 of the ratio of lengths and on the gold outcome.
      outside: the mean probability outside of the options over the verdicts that state it; None if none does.
      calibration_error: the expected calibration error of the labels of the pairs with a better answer; None if there are none.
      requests: the number of comparisons that the judge was asked for.
      problems: the number of comparisons without a verdict, by reason (`reasons.PROBLEMS`), the most frequent first.
      principles: the measures under each principle, by name.
      kinds: the measures of each kind of pairs, by name.
    """

    pairs: int
    ties: int
    without_verdict: int
    accuracy: Share
    accuracy_all: Share
    kappa: AuditEstimate
    flips: Share
    first_position: Share
    length_coefficient: AuditEstimate
    outside: float | None
    calibration_error: float | None
    requests: int
    problems: Mapping[str, int]
    principles: Mapping[str, AuditPart]
    kinds: Mapping[str, AuditPart]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def outcome(probability: float, margin: float) -> str:
    """The outcome of a comparison, from the probability in [0, 1] that the first answer is better.

    margin: a probability closer to 0.5 than this is a tie.
    """
    if bool(labels.is_undecided(probability, margin)):
        return TIE
    return FIRST if probability > 0.5 else SECOND


def make_audit(trials: Sequence[Trial], margin: float, seed: int = 0) -> Audit:
    """Computes the measures.

    Args:
      trials: one for each gold pair and principle.
      margin: see `outcome`.
      seed: determines the resamples of the bootstrap intervals.
    """
    by_pair = _grouped(trials, lambda trial: trial.pair)
    cases = [_case(group, margin) for group in by_pair.values()]
    judged = [case for case in cases if case.label is not None]
    twice = [case for case in cases if TIE not in case.orders and None not in case.orders]
    part = _part(cases)
    verdicts = [verdict for trial in trials for verdict in trial.verdicts]
    outside = [verdict.outside for verdict in verdicts if verdict.outside is not None]
    problems = collections.Counter(verdict.problem or "none" for verdict in verdicts if verdict.probability is None)
    under = _grouped(trials, lambda trial: trial.principle)
    kinds = _grouped(list(zip(by_pair.values(), cases, strict=True)), lambda pair: pair[0][0].kind)
    return Audit(
        pairs=len(cases),
        ties=sum(case.gold == TIE for case in cases),
        without_verdict=len(cases) - len(judged),
        accuracy=part.accuracy,
        accuracy_all=_share([case.outcome == case.gold for case in cases]),
        kappa=_estimate(lambda cases: cohen_kappa([c.gold for c in cases], [c.outcome for c in cases]), judged, seed),
        flips=part.flips,
        first_position=_share([((case.orders[0] == FIRST) + (case.orders[1] == SECOND)) / 2 for case in twice]),
        length_coefficient=_estimate(_length_coefficient, judged, seed),
        outside=float(np.mean(outside)) if outside else None,
        calibration_error=_calibration_error(judged),
        requests=len(verdicts),
        problems=dict(problems.most_common()),
        principles={name: _part([_case([trial], margin) for trial in group]) for name, group in sorted(under.items())},
        kinds={name: _part([case for _, case in group]) for name, group in kinds.items() if name is not None},
    )


class _Case(NamedTuple):
    """The verdicts on one pair. Outcomes and the label (the probability that the first answer is better) refer to the first
    order of the answers; None without a verdict. doublings: log2 of the ratio of the answers' lengths."""

    gold: str
    outcome: str | None
    orders: tuple[str | None, str | None]
    label: float | None
    doublings: float


def _case(trials: Sequence[Trial], margin: float) -> _Case:
    """The averages over the principles of one pair, as in `Labeller`: a principle counts with a verdict in both orders."""
    both = [
        (first.probability, 1.0 - swapped.probability)
        for first, swapped in (trial.verdicts for trial in trials)
        if first.probability is not None and swapped.probability is not None
    ]
    gold, lengths = trials[0].gold, trials[0].lengths
    doublings = math.log2(max(1, lengths[0]) / max(1, lengths[1]))
    if not both:
        return _Case(gold, None, (None, None), None, doublings)
    first, swapped = (float(np.mean(side)) for side in zip(*both, strict=True))
    label = float(labels.average_orders(first, swapped))
    return _Case(gold, outcome(label, margin), (outcome(first, margin), outcome(swapped, margin)), label, doublings)


def _part(cases: Sequence[_Case]) -> AuditPart:
    decided = [case for case in cases if case.gold != TIE and case.outcome in (FIRST, SECOND)]
    twice = [case for case in cases if TIE not in case.orders and None not in case.orders]
    accuracy = _share([case.outcome == case.gold for case in decided])
    return AuditPart(len(cases), accuracy, _share([case.orders[0] != case.orders[1] for case in twice]))


def _share(values: Sequence[float]) -> Share:
    count, total = float(sum(values)), len(values)
    return Share(count, total, count / total if total else None, *wilson_interval(count, total))


def _estimate(measure: Callable[[Sequence[_Case]], float | None], cases: Sequence[_Case], seed: int) -> AuditEstimate:
    interval = bootstrap_interval(lambda rows: measure([cases[row] for row in rows]), len(cases), seed)
    return AuditEstimate(measure(cases), *(interval or (None, None)))


_PREFERS = {FIRST: 1.0, TIE: 0.5, SECOND: 0.0}


def _length_coefficient(cases: Sequence[_Case]) -> float | None:
    """There is no intercept: the outcome averages both orders, so that exchanging the answers changes all signs."""
    if not any(case.doublings for case in cases):
        return None
    features = [(case.doublings, 2 * _PREFERS[case.gold] - 1) for case in cases]
    return float(logistic_coefficients(features, [_PREFERS[case.outcome] for case in cases])[0])


def _calibration_error(cases: Sequence[_Case]) -> float | None:
    """Each pair counts with both answers, so that the error does not depend on their order."""
    known = [case for case in cases if case.gold != TIE]
    if not known:
        return None
    label, gold = np.asarray([case.label for case in known]), np.asarray([_PREFERS[case.gold] for case in known])
    return float(expected_calibration_error(np.concatenate([label, 1 - label]), np.concatenate([gold, 1 - gold])))


def _grouped(items: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
