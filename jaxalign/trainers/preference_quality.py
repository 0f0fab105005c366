"""Measures a preference model on held-out pairs: accuracy, loss, calibration, and baselines of the accuracy.

The baselines are the length of the answers and the noise of the labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxalign.algorithms.calibration import expected_calibration_error, fit_temperature, reliability_bins
from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.records import Comparison, PairBatch


def accuracy(scores: np.ndarray, label: np.ndarray) -> dict | None:
    """How often the label prefers the answer with the higher score.

    Args:
      scores: float32 [B, 2].
      label: float32 [B]; pairs with a label of 0.5 do not count.

    Returns:
      The number of pairs, the accuracy and its 95% Wilson interval; None if no label prefers an answer.
    """
    decided = np.abs(label - 0.5) > 1e-6
    total = int(decided.sum())
    if not total:
        return None
    right = int(np.sum((scores[:, 0] > scores[:, 1])[decided] == (label > 0.5)[decided]))
    low, high = wilson_interval(right, total)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high}


def held_out_metrics(scores: np.ndarray, pairs: PairBatch) -> dict[str, float]:
    """The metrics of an evaluation during training, over pairs whose label prefers an answer, by their weights.

    Args:
      scores: float32 [B, 2], raw scores.
      pairs: the pairs. The label of at least one with a weight above 0 must prefer an answer.

    Returns:
      held_out_loss, the Bradley-Terry loss in nats per pair, and held_out_accuracy, 0 to 1.
    """
    decided = np.abs(pairs.label - 0.5) > 1e-6
    (first, second), label, weight = scores[decided].T, pairs.label[decided], pairs.weight[decided]
    loss = np.asarray(bradley_terry(first, second, label), np.float64)
    right = (first > second) == (label > 0.5)
    return {
        "held_out_loss": float(np.average(loss, weights=weight)),
        "held_out_accuracy": float(np.average(right, weights=weight)),
    }


def measure(scores: np.ndarray, pairs: PairBatch, temperature_fit: bool = False, bins: int = 10) -> dict:
    """Accuracy, calibration and loss of raw scores [B, 2] on held-out pairs whose label prefers an answer.

    With `temperature_fit`, calibration is measured after dividing scores by a fitted temperature, and the result includes the
    temperature and the calibration errors before and after.
    """
    decided = np.abs(pairs.label - 0.5) > 1e-6
    if not decided.any():
        return {"held_out": None, "calibration": None}
    held_out = accuracy(scores, pairs.label)
    scores, label = scores[decided], pairs.label[decided]
    loss = float(np.mean(bradley_terry(scores[:, 0], scores[:, 1], label)))
    # Each pair counts in both orders, so that the plot does not depend on the order of its answers.
    both = np.concatenate([label, 1 - label])

    def ece(margin: np.ndarray):
        prob = np.asarray(jax.nn.sigmoid(np.concatenate([margin, -margin])))
        return float(expected_calibration_error(prob, both, bins)), reliability_bins(prob, both, bins)

    margin, extra = scores[:, 0] - scores[:, 1], {}
    if temperature_fit:
        before, _ = ece(margin)
        margin, fitted = cross_fitted(margin, label)
        extra = {"temperature": fitted | {"ece_before": before, "ece_after": ece(margin)[0]}}
    error, plot = ece(margin)
    held_out |= {"loss": loss, "ece": error}
    named = {name: [float(x) for x in getattr(plot, name)] for name in ("edges", "confidence", "accuracy", "count")}
    return {"held_out": held_out, "calibration": named} | extra


def cross_fitted(margin: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, dict]:
    """(margins divided by a temperature, float32 [B]; the temperatures).

    Cross-fits in two folds: the temperature of each half of the pairs is the maximum-likelihood estimate on the other half, so
    that no pair is measured with a temperature that was fitted on it. `value` is fitted on all pairs. The likelihood is that of
    the answer that the label prefers.
    """
    outcome = (label > 0.5).astype(np.float32)
    odd = np.arange(len(label)) % 2 == 1
    folds = [float(fit_temperature(margin[rest], outcome[rest])) for rest in (odd, ~odd)]
    temperature = np.where(odd, folds[1], folds[0]).astype(np.float32)
    return margin / temperature, {"value": float(fit_temperature(margin, outcome)), "folds": folds}


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
    probabilities = [
        pair.label if pair.label_ab is None or pair.label_ba is None else (pair.label_ab + pair.label_ba) / 2
        for pair in pairs
        if abs(pair.label - 0.5) > 1e-6
    ]
    if all(p in (0, 1) for p in probabilities):
        return None
    return float(np.mean([max(p, 1 - p) for p in probabilities]))
