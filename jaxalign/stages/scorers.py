"""Loads the learnt reward of an earlier stage: the one door to it for every stage that scores."""

from __future__ import annotations

import json

from jaxalign.models.model import Model, Params
from jaxalign.stages.base import StageContext
from jaxalign.training.checkpoint import load_params
from jaxalign.training.scorer import Scorer


def load_scorer(context: StageContext, policy: Model, clip: float | None = None) -> tuple[Scorer, Params]:
    """The preference model of this run, with the normalisation that it measured.

    policy is the run's architecture. clip bounds normalised scores to +-clip; None does not.
    """
    directory = context.input_directory("preference")
    model = policy.with_head("scalar")
    found = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return Scorer(model, found["shift"], found["scale"], clip), load_params(directory / "params", model)
