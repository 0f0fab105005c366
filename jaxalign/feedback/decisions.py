"""From a judge's verdicts on a pair to its label: correction of position bias, margin, ties, and the deciding principle.

A pair is asked under several principles, in both orders. Let ab and ba be P(response_a is better) with response_a shown first
and second, after the correction. Then m = (ab + ba) / 2 - 0.5 is the judge's preference and d = (ab - ba) / 2 its
contradiction. If a judge sees no difference, its two orders differ from 0.5 only by noise, and m and d have the same
distribution. The number of labels with a large d therefore estimates how many labels have a large m by chance, as in the
knockoff filter (Barber and Candès 2015, Annals of Statistics 43).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxalign.algorithms import labels as algorithms
from jaxalign.config import FeedbackConfig
from jaxalign.records import Comparison, PrincipleLabel

FALLBACK_MARGIN = 0.1
"""The margin where there are no labels to estimate it from."""
FEWEST_LABELS = 20
"""The smallest number of labels, each asked in both orders, from which the margin and the position bias are estimated."""
FEWEST_PER_PRINCIPLE = 50
"""The smallest number of labels of one principle from which its own position bias is estimated."""
MARGINS = tuple(round(0.02 + 0.01 * i, 2) for i in range(48))
LARGEST_LOG_ODDS = 5.0
"""Log-odds beyond this count as equally certain, so that rounding of probabilities near 0 and 1 is no position bias."""
_FINITE = 1e-6
_EQUAL = 1e-6


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How labels are decided.

    Attributes:
      margin: a label closer to 0.5 is undecided.
      position: for each principle, the log-odds that the judge adds to the answer shown first; "" for all others.
      chance_share: the estimated share of chance decisions among the decided labels; None if it was not estimated.
      labels: the number of labels from which all this was estimated.
    """

    margin: float
    position: Mapping[str, float] = dataclasses.field(default_factory=dict)
    chance_share: float | None = None
    labels: int = 0

    def corrected(self, label: PrincipleLabel) -> tuple[float, float]:
        """(ab, ba) without the position bias, of a label that was asked in both orders."""
        bias = self.position.get(label.principle, self.position.get("", 0.0))
        return _shifted(label.ab, -bias), 1.0 - _shifted(1.0 - label.ba, -bias)


def fixed(config: FeedbackConfig) -> Calibration:
    """The calibration of labels that are decided before others are known: the margin of the config, without a correction."""
    return Calibration(FALLBACK_MARGIN if config.undecided_margin is None else config.undecided_margin)


def calibrate(labels: Sequence[PrincipleLabel], config: FeedbackConfig) -> Calibration:
    """Estimates the position bias and, if `config.undecided_margin` is None, the margin.

    Labels that were not asked in both orders do not count. With fewer than `FEWEST_LABELS`, nothing is estimated.
    """
    both = [label for label in labels if label.ab is not None and label.ba is not None]
    if len(both) < FEWEST_LABELS:
        return dataclasses.replace(fixed(config), labels=len(both))
    calibration = Calibration(fixed(config).margin, position_bias(both) if config.correct_position else {}, labels=len(both))
    firm = [label for label in both if not is_tie(label)]
    ab, ba = np.asarray([calibration.corrected(label) for label in firm], np.float64).reshape(-1, 2).T
    if config.undecided_margin is None:
        margin, share = margin_by_spread(ab, ba, config.max_chance_share, config.consistent)
    else:
        margin, share = config.undecided_margin, chance_share(ab, ba, config.undecided_margin, config.consistent)
    return dataclasses.replace(calibration, margin=margin, chance_share=share)


def position_bias(labels: Sequence[PrincipleLabel]) -> dict[str, float]:
    """The median over labels of the mean log-odds, over both orders, that the answer shown first is better.

    A preference for one of the answers has opposite signs in the two orders and cancels; the preference for the first position
    remains. A principle with at least `FEWEST_PER_PRINCIPLE` labels has an estimate of its own.

    Returns:
      The estimate by principle, and over all labels under "".
    """
    by_principle: dict[str, list[float]] = {}
    for label in labels:
        odds = np.clip([_log_odds(label.ab), _log_odds(1.0 - label.ba)], -LARGEST_LOG_ODDS, LARGEST_LOG_ODDS)
        by_principle.setdefault(label.principle, []).append(float(odds.mean()))
    medians = {"": float(np.median([value for values in by_principle.values() for value in values]))}
    for name, values in sorted(by_principle.items()):
        if len(values) >= FEWEST_PER_PRINCIPLE:
            medians[name] = float(np.median(values))
    return medians


def chance_share(ab: np.ndarray, ba: np.ndarray, margin: float, consistent: bool = True) -> float | None:
    """The estimated share of chance decisions among the labels that are decided at `margin`; None if none is decided.

    Args:
      ab: float64 [N], P(response_a is better) with response_a shown first.
      ba: float64 [N], the same with response_a shown second.
      margin: the margin.
      consistent: whether a label is decided only if both orders prefer the same answer.
    """
    preference, contradiction = np.abs((ab + ba) / 2 - 0.5), np.abs(ab - ba) / 2
    decided, mirrored = preference > margin + _EQUAL, contradiction > margin + _EQUAL
    if consistent:
        decided, mirrored = decided & (preference > contradiction + _EQUAL), mirrored & (contradiction > preference + _EQUAL)
    count = int(decided.sum())
    return min(1.0, int(mirrored.sum()) / count) if count else None


def margin_by_spread(ab: np.ndarray, ba: np.ndarray, limit: float, consistent: bool = True) -> tuple[float, float | None]:
    """(the smallest of `MARGINS` at which `chance_share` is at most `limit`, the share there).

    If there is none, the margin with the smallest share. Takes the arguments of `chance_share`.
    """
    shares = {margin: chance_share(ab, ba, margin, consistent) for margin in MARGINS}
    known = {margin: share for margin, share in shares.items() if share is not None}
    if not known:
        return FALLBACK_MARGIN, None
    margin = next((margin for margin, share in known.items() if share <= limit), min(known, key=known.get))
    return margin, known[margin]


def is_tie(label: PrincipleLabel) -> bool:
    """Whether the judge says that neither answer is better."""
    return label.tie is not None and label.tie > 0.5


def decide(comparison: Comparison, calibration: Calibration, config: FeedbackConfig, invert: bool = False) -> Comparison:
    """The comparison with the label that follows from its verdicts (`comparison.labels`).

    A principle decides if the judge calls no tie under it, and the label is farther from 0.5 than the margin and, with
    `config.consistent`, on the same side in both orders. The pair's label is the mean over the principles that decide
    (`config.aggregate="decided"`), the mean over all ("mean"), or the label of the strongest ("strongest").

    Returns:
      `comparison` with label, label_ab, label_ba, decided, principle, outcome and the reasoning of the deciding principle.
    """
    asked = [label for label in comparison.labels if label.ab is not None and label.ba is not None]
    sides = {label.principle: calibration.corrected(label) for label in asked}
    means = {name: float(algorithms.average_orders(*pair)) for name, pair in sides.items()}
    deciding = []
    for label in asked:
        ab, ba = sides[label.principle]
        agree = not config.consistent or (ab - 0.5) * (ba - 0.5) > 0
        if agree and not is_tie(label) and not bool(algorithms.is_undecided((ab + ba) / 2, calibration.margin)):
            deciding.append(label.principle)
    counted = deciding if config.aggregate != "mean" and deciding else list(means)
    if config.aggregate == "strongest":
        counted = sorted(counted, key=lambda name: -abs(means[name] - 0.5))[:1]
    ab, ba = (float(np.mean([sides[name][side] for name in counted])) if counted else None for side in (0, 1))
    label = float(algorithms.average_orders(ab, ba)) if counted else 0.5
    decided = bool(deciding) and not bool(algorithms.is_undecided(label, calibration.margin))
    agreeing = [name for name in deciding if (means[name] > 0.5) == (label > 0.5)]
    principle = max(agreeing, key=lambda name: abs(means[name] - 0.5), default=None) if decided else None
    label = label if decided else 0.5
    if config.reasoning:
        label = float(algorithms.clamp_label(label, config.clamp_low, config.clamp_high))
    if invert:
        label = float(algorithms.invert_label(label))
    first = comparison.labels[0] if comparison.labels else None
    shown = next((entry for entry in comparison.labels if entry.principle == principle), first)
    return dataclasses.replace(
        comparison, label=label, label_ab=ab, label_ba=ba, decided=decided, principle=principle,
        outcome=None if decided else _outcome(comparison, asked, sides, deciding, calibration),
        reasoning_ab=shown and shown.reasoning_ab, reasoning_ba=shown and shown.reasoning_ba,
    )


def _outcome(
    comparison: Comparison, asked: Sequence[PrincipleLabel], sides: Mapping[str, tuple[float, float]], deciding: Sequence[str],
    calibration: Calibration,
) -> str:
    """Why a pair is undecided: a name in `reasons.COMPARISON`."""
    if comparison.problem is not None:
        return comparison.problem
    if comparison.response_a == comparison.response_b:
        return "identical"
    if len(deciding) > 1:
        return "conflict"
    margin = calibration.margin
    if any((ab - 0.5) * (ba - 0.5) < 0 and abs(ab - ba) / 2 > margin for ab, ba in sides.values()):
        return "order"
    ties = sum(is_tie(label) for label in comparison.labels)
    return "tie" if 2 * ties > len(comparison.labels) else "undecided" if asked or ties else "none"


def _log_odds(probability: float) -> float:
    probability = min(max(probability, _FINITE), 1 - _FINITE)
    return float(np.log(probability) - np.log1p(-probability))


def _shifted(probability: float, log_odds: float) -> float:
    """The probability after adding to its log-odds. 0, 1 and a shift of 0 change nothing."""
    if log_odds == 0 or probability in (0.0, 1.0):
        return probability
    return float(1 / (1 + np.exp(-(_log_odds(probability) + log_odds))))
