"""The win rate of one model over another on the same prompts: bootstrap intervals, and the rate at equal lengths.

The length-controlled rate is that of AlpacaEval 2 (Dubois et al. 2024, arXiv 2404.04475): a logistic regression of the judge's
preference on the difference of the lengths, evaluated at a difference of 0. Computed on the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxalign.algorithms.statistics import logistic_coefficients

RESAMPLES = 1000
"""The number of bootstrap resamples."""
LEAST = 10
"""The fewest prompts for a length-controlled rate and for an interval of a mean difference: percentile intervals of fewer cases
are too narrow."""
FEW, CONSTANT, EQUAL_LENGTHS, SEPARABLE = "few", "constant", "equal_lengths", "separable"
"""Why there is no length-controlled rate: there are fewer than `LEAST` prompts; all pairs have the same outcome; all length
differences are the same; the length difference predicts every outcome. In the last three cases, the likelihood has no unique
maximum."""
_PRIOR = (10.0, 2.5)  # Standard deviations for the intercept and the length; those of Gelman et al. 2008, but normal.


@dataclasses.dataclass(frozen=True)
class PairedRates:
    """The results of `paired_rates`. All intervals are 95% percentile intervals.

    Attributes:
      bootstrap_low, bootstrap_high: the bounds of the win rate.
      length_difference: the mean length of the model's answers minus that of the other answers, characters.
      length_controlled: the win rate at equal lengths, in 0..1; None if it is undefined.
      length_controlled_low, length_controlled_high: its bounds; None if it is undefined.
      length_controlled_problem: why it is undefined: `FEW`, `CONSTANT`, `EQUAL_LENGTHS` or `SEPARABLE`; None if it is
        defined.
    """

    bootstrap_low: float
    bootstrap_high: float
    length_difference: float
    length_controlled: float | None
    length_controlled_low: float | None
    length_controlled_high: float | None
    length_controlled_problem: str | None


def paired_rates(outcomes: Any, differences: Any, seed: int = 0, resamples: int = RESAMPLES) -> PairedRates:
    """Intervals of a win rate by resampling prompts (Efron 1979), and the win rate at equal lengths.

    The model is logit P(win) = theta + phi * tanh(d / std(d)), where d is the difference of the lengths: the model of arXiv
    2404.04475 without the term of the difficulty of each instruction, which the paper estimates from the answers of many models
    to the same instructions. The rate at equal lengths is sigmoid(theta). As in the code of AlpacaEval
    (metrics/glm_winrate.py), lengths are in characters and d is divided by its sample deviation but not centred. A normal prior
    with standard deviations 10 (theta) and 2.5 (phi) keeps the fits of resamples finite; the code of AlpacaEval uses an L1
    penalty chosen by cross-validation, and answers of its baseline that were made longer and shorter. Resamples share std(d).

    Args:
      outcomes: real [B]: for each prompt 1 if the model's answer is better, 0 if the other one is, 0.5 without a decision.
      differences: real [B]: the length of the model's answer minus that of the other answer, characters.
      seed: determines the resamples. The same prompts are drawn for both rates.
      resamples: their number.

    Raises:
      ValueError: there is no prompt, or the shapes differ.
    """
    outcomes, differences = np.asarray(outcomes, np.float64), np.asarray(differences, np.float64)
    if outcomes.ndim != 1 or outcomes.shape != differences.shape or not len(outcomes):
        raise ValueError(f"outcomes are {outcomes.shape} and differences {differences.shape}; two arrays [B] are expected")
    count = len(outcomes)
    counts = _resampled_counts(count, seed, resamples)
    problem, controlled, bounds = length_problem(outcomes, differences), None, (None, None)
    if problem is None:
        features = np.stack([np.ones(count), np.tanh(differences / differences.std(ddof=1))], axis=1)
        controlled = float(_sigmoid(logistic_coefficients(features, outcomes, _PRIOR)[0]))
        bounds = _bounds(_sigmoid(logistic_coefficients(features, outcomes, _PRIOR, weights=counts)[:, 0]))
    return PairedRates(*_bounds(counts @ outcomes / count), float(differences.mean()), controlled, *bounds, problem)


def length_problem(outcomes: np.ndarray, differences: np.ndarray) -> str | None:
    """Why there is no length-controlled rate; None if there is one.

    The likelihood has a unique maximum if and only if the differences of wins and of losses overlap, where a tie is half a win
    and half a loss (Albert and Anderson 1984).

    Args:
      outcomes, differences: as in `paired_rates`.
    """
    if len(outcomes) < LEAST:
        return FEW
    wins, losses = differences[outcomes > 0], differences[outcomes < 1]
    if not len(wins) or not len(losses):
        return CONSTANT
    if np.ptp(differences) == 0:
        return EQUAL_LENGTHS
    return SEPARABLE if wins.min() >= losses.max() or wins.max() <= losses.min() else None


def mean_difference(
    values: Any, others: Any, seed: int = 0, resamples: int = RESAMPLES, weights: Any | None = None
) -> dict[str, Any]:
    """The mean difference of two models' values on the same cases, with its percentile interval by resampling cases.

    Args:
      values, others: real [B]: the values of the model and of the other one, by case.
      seed: determines the resamples.
      resamples: their number.
      weights: real [B], above 0: the weight of each case in the mean; None for equal weights.

    Returns:
      "difference", its bounds "low" and "high" (None for fewer than `LEAST` cases), and "cases" (B).

    Raises:
      ValueError: there is no case, or the shapes differ.
    """
    values, others = np.asarray(values, np.float64), np.asarray(others, np.float64)
    if values.ndim != 1 or values.shape != others.shape or not len(values):
        raise ValueError(f"values are {values.shape} and others {others.shape}; two arrays [B] are expected")
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    differences, count = weights * (values - others), len(values)
    low, high = None, None
    if count >= LEAST:
        counts = _resampled_counts(count, seed, resamples)
        low, high = _bounds(counts @ differences / (counts @ weights))
    return {"difference": float(differences.sum() / weights.sum()), "low": low, "high": high, "cases": count}


def _resampled_counts(count: int, seed: int, resamples: int) -> np.ndarray:
    """int [R, B]: how often each of B cases is drawn in each of R resamples with replacement."""
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(logits / 2))


def _bounds(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
