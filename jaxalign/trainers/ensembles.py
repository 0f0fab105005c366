"""Joins the members of an ensemble of preference models into one scorer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import PreferenceConfig
from jaxalign.models.model import Model, Params
from jaxalign.records import PairBatch
from jaxalign.rewards.scorer import Ensemble, Scorer
from jaxalign.trainers.preference_quality import accuracy
from jaxalign.trainers.scoring import all_scores


def make_ensemble(
    section: PreferenceConfig, model: Model, members: Sequence[Params], train: PairBatch, held_out: PairBatch | None = None
) -> tuple[Scorer, dict]:
    """(the scorer of an ensemble, its part of the summary).

    With `normalise`, each member's scores are shifted and scaled on the answers of the training pairs to mean 0 and to the
    standard deviation that the members have on average, so that score differences stay in nats. `disagreement` is the standard
    deviation across members of a held-out answer's score, averaged over answers and divided by that same average standard
    deviation; None without held-out pairs.
    """
    single = Scorer(model)
    statistics = [score_statistics(all_scores(single, params, train, section.batch).reshape(-1)) for params in members]
    shift, scale = (np.asarray(column, np.float64) for column in zip(*statistics, strict=True))
    unit = float(scale.mean())
    if not section.normalise:
        shift, scale = np.zeros_like(shift), np.full_like(scale, unit)
    ensemble = Ensemble(
        tuple(float(x) for x in shift), tuple(float(x) for x in scale / unit), section.combine, section.std_weight
    )
    if held_out is None:
        return Scorer(model, ensemble=ensemble), {}
    scores = np.stack([all_scores(single, params, held_out, section.batch) for params in members])
    apart = np.asarray(ensemble.normalised(scores.reshape(len(members), -1))).std(axis=0)
    rows = [
        {"shift": a, "scale": b, "held_out": accuracy(row, held_out.label)}
        for a, b, row in zip(ensemble.shift, ensemble.scale, scores, strict=True)
    ]
    summary = {"members": rows, "combine": section.combine, "std_weight": section.std_weight}
    summary["disagreement"] = float(apart.mean() / unit) if apart.size else None
    return Scorer(model, ensemble=ensemble), summary
