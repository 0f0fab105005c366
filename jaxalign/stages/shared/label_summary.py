"""The summary of labelled pairs: counts, the judge's agreement with itself, its position bias, and each principle's part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.feedback.critique import count_outcomes
from jaxalign.feedback.decisions import Calibration, is_tie
from jaxalign.records import Comparison, PrincipleLabel
from jaxalign.stages.shared.labelled import row_comparison

_CLOSE = 1e-3
"""A probability closer to 0.5 prefers neither answer."""


def summarise(rows: Sequence[Mapping[str, Any]], calibration: Calibration) -> dict[str, Any]:
    """The summary of stage compare's rows. Shares are None if nothing was asked."""
    pairs = [row_comparison(row) for row in rows]
    asked = [pair for pair in pairs if pair.response_a != pair.response_b]
    labels = [label for pair in asked for label in pair.labels]
    both = [pair for pair in asked if pair.label_ab is not None and pair.label_ba is not None]
    confidence = [abs((pair.label_ab + pair.label_ba) / 2 - 0.5) + 0.5 for pair in both]
    counts, edges = np.histogram(confidence, bins=10, range=(0.5, 1.0))
    apart = [pair.disagreement for pair in pairs if pair.disagreement is not None]
    outside = [pair.outside for pair in pairs if pair.outside is not None]
    return {
        "pairs": len(rows),
        "identical_pairs": len(rows) - len(asked),
        "incomplete": sum(len(pair.incomplete) for pair in asked),
        "undecided": sum(not pair.decided for pair in asked),
        "unparsable": sum(pair.problem is not None for pair in asked),
        "outcomes": count_outcomes(row.get("outcome") for row in rows),
        "decided_share": sum(pair.decided for pair in asked) / max(1, len(rows)),
        "outside_mass": _mean(outside),
        **({"disagreement": _mean(apart)} if apart else {}),
        **_self_agreement(labels),
        "confidence_histogram": {"edges": [float(x) for x in edges], "counts": [int(x) for x in counts]},
        "calibration": dataclasses.asdict(calibration) | {"position": dict(calibration.position)},
        "principles": {name: _principle(name, asked) for name in sorted({label.principle for label in labels})},
    }


def _principle(name: str, asked: Sequence[Comparison]) -> dict[str, Any]:
    """The part of one principle: under how many pairs it was asked, how it answered, and how many labels it decided."""
    labels = [label for pair in asked for label in pair.labels if label.principle == name]
    return {
        "pairs": len(labels),
        "decides": sum(pair.principle == name for pair in asked),
        "mean_confidence": _mean([abs((x.ab + x.ba) / 2 - 0.5) + 0.5 for x in labels if x.ab is not None and x.ba is not None]),
        **_self_agreement(labels),
    }


def _self_agreement(labels: Sequence[PrincipleLabel]) -> dict[str, Any]:
    """ties: the share of labels that are ties. position_bias: the mean P(the answer shown first is better) - 0.5.
    order_agreement: the share of labels with the same verdict in both orders: response_a, response_b, or neither."""
    both = [label for label in labels if label.ab is not None and label.ba is not None]
    sides = [[0 if abs(p - 0.5) < _CLOSE else 1 if p > 0.5 else -1 for p in (label.ab, label.ba)] for label in both]
    known = [label for label in labels if label.tie is not None]
    return {
        "ties": _mean([is_tie(label) for label in known]),
        "position_bias": _mean([(label.ab + 1 - label.ba) / 2 - 0.5 for label in both]),
        "order_agreement": _mean([first == second for first, second in sides]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
