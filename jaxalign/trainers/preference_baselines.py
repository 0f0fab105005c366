"""Baselines of a preference model's held-out accuracy: chance, the length of the answers, and the noise of the labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.records import Comparison, PairBatch


def length_baseline(train: PairBatch, held_out: PairBatch) -> dict | None:
    """The accuracy of the rule "the longer answer is better", or "the shorter", whichever is right more often on `train`.

    Lengths are in tokens. A pair of equally long answers counts one half under both rules. Pairs whose label is 0.5 do not
    count.

    Returns:
      rule ("longer" or "shorter"), pairs, accuracy, and low and high, the bounds of its 95% Wilson interval; None if no
      held-out label prefers an answer.
    """
    right, total = _longer_is_right(held_out)
    if not total:
        return None
    train_right, train_total = _longer_is_right(train)
    longer = train_right >= train_total / 2
    right = right if longer else total - right
    low, high = wilson_interval(right, total)
    rule = "longer" if longer else "shorter"
    return {"rule": rule, "pairs": total, "accuracy": right / total, "low": low, "high": high}


def _longer_is_right(pairs: PairBatch) -> tuple[float, int]:
    """(for how many pairs the label prefers the longer answer, a tie counting one half; the number of pairs that count).

    Both answers of a pair follow the same prompt, so the longer sequence has the longer answer.
    """
    decided = np.abs(pairs.label - 0.5) > 1e-6
    longer, preferred = np.sign(pairs.length[:, 0] - pairs.length[:, 1])[decided], np.sign(pairs.label - 0.5)[decided]
    return float(np.sum((1 + longer * preferred) / 2)), int(decided.sum())


def noise_ceiling(pairs: Sequence[Comparison]) -> float | None:
    """The expected accuracy of a perfect model, if the labels are calibrated: the mean of max(p, 1 - p).

    p is the judge's probability that the first answer is better, averaged over both orders if both are known and not clamped;
    otherwise the label. If p is right, the answer that the label prefers is the better one with probability max(p, 1 - p), and
    no model can agree with the better one more often: this is the accuracy of the Bayes classifier (Devroye, Gyoerfi and Lugosi
    1996, "A Probabilistic Theory of Pattern Recognition", theorem 2.1). Pairs whose label is 0.5 do not count.

    Returns:
      A number from 0.5 to 1; None if no label is strictly between 0 and 1, since hard labels do not state their noise.
    """
    found = [_probability(pair) for pair in pairs if abs(pair.label - 0.5) > 1e-6]
    if all(p in (0, 1) for p in found):
        return None
    return float(np.mean([max(p, 1 - p) for p in found]))


def _probability(pair: Comparison) -> float:
    if pair.label_ab is None or pair.label_ba is None:
        return pair.label
    return (pair.label_ab + pair.label_ba) / 2
