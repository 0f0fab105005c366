"""Measures a preference model on held-out pairs: accuracy, loss and calibration."""

from __future__ import annotations

import jax
import numpy as np

from jaxalign.algorithms.calibration import expected_calibration_error, fit_temperature, reliability_bins
from jaxalign.algorithms.preference_losses import bradley_terry
from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.records import PairBatch


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


def measurable(pairs: PairBatch | None) -> bool:
    """Whether the label of a pair with a weight above 0 prefers an answer."""
    return pairs is not None and bool(np.any((np.abs(pairs.label - 0.5) > 1e-6) & (pairs.weight > 0)))


def held_out_metrics(scores: np.ndarray, pairs: PairBatch) -> dict[str, float]:
    """The metrics of an evaluation during training, over pairs whose label prefers an answer, by their weights.

    Args:
      scores: float32 [B, 2], raw scores.
      pairs: the pairs, which must be `measurable`.

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
