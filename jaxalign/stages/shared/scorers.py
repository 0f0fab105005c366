"""Loads the reward model of an earlier stage for stages that score answers."""

from __future__ import annotations

from pathlib import Path

from jaxalign.models.model import Model, Params
from jaxalign.rewards.scorer import Ensemble, Scorer, stack_members, student_model
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.steps.checkpoint import load_params
from jaxalign.tracking.workdir import read_object
from jaxalign.trainers.reward_model import member_directory


def load_scorer(
    context: StageContext, source: str, policy: Model, clip: float | None = None
) -> tuple[Scorer, Params]:
    """(a reward model of this run, its weights). An ensemble's weights are stacked.

    Takes the arguments of `find_scorer`.
    """
    scorer, folders = find_scorer(context, source, policy, clip)
    members = [run_models.with_base(context, scorer.model, load_params(folder / "params", scorer.model)) for folder in folders]
    return scorer, members[0] if scorer.ensemble is None else stack_members(members)


def find_scorer(
    context: StageContext, source: str, policy: Model, clip: float | None = None
) -> tuple[Scorer, list[Path]]:
    """(a reward model of this run without its weights, the folder of each member).

    Args:
      source: "preference", or "distilled" for its student.
      policy: the run's architecture.
      clip: clips normalised scores to +-clip; None for no clipping.

    The scorer has the normalisation that its stage measured.
    """
    ensemble = None
    if source == "preference":
        directory, model = context.input_directory("preference"), policy.with_head("scalar")
    else:
        directory, model = context.input_directory("reward_distill"), student_model(context.config.reward_distill, policy)
    summary = read_object(directory / "summary.json")
    folders = [directory]
    if source == "preference" and "members" in summary:
        shift, scale = (tuple(member[name] for member in summary["members"]) for name in ("shift", "scale"))
        ensemble = Ensemble(shift, scale, summary["combine"], summary["std_weight"])
        folders = [member_directory(directory, number) for number in range(len(shift))]
    return Scorer(model, summary["shift"], summary["scale"], clip, ensemble), folders
