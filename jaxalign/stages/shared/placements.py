"""The placement of the roles of stages ppo and online_dpo: `config.placement`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.planner.shapes import policy_model
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.rewards import reward_records
from jaxalign.rl.placing import FLAT, PlacedRun, check_options, place_roles, ppo_run
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import find_scorer


class Placed(NamedTuple):
    """The mesh of each role, and the placement as JSON values; None and {} if all roles share the run's mesh."""

    shardings: Mapping[str, Sharding] | None
    values: dict[str, Any]

    def model(self, role: str, policy: Model) -> Model:
        """A model like the policy's on the mesh of a role; a role that is not placed has that of the policy."""
        if self.shardings is None:
            return policy
        return policy.on(self.shardings.get(role, self.shardings["policy"]))


def ppo_placement(context: StageContext, policy: Model) -> Placed:
    """The placement of stage ppo, printed. policy: its model on the run's mesh.

    Raises:
      UserError: the placement is not possible on the devices of this run.
    """
    config = context.config
    if config.placement.strategy == FLAT:
        return Placed(None, {})
    names = [record.name for record in reward_records(config.reward.source)]
    known = next((name for name in names if name in ("preference", "distilled")), None)
    scorer = None if known is None else find_scorer(context, known, policy, config.ppo.score_clip)[0].model
    placed = _place(context, _ppo(config, policy, scorer))
    check_options(config.ppo, placed.shardings)
    return placed


def online_dpo_placement(context: StageContext, policy: Model) -> Placed:
    """`ppo_placement` for stage online_dpo, whose judge has the role "judge" if it runs on devices of this run."""
    if context.config.placement.strategy == FLAT:
        return Placed(None, {})
    return _place(context, _online_dpo(context.config, policy))


def check_placements(config: Config, stages: Collection[str]) -> None:
    """Raises UserError before any of `stages` runs if the devices or the model of this run do not allow `config.placement`."""
    settings = config.placement
    if settings.strategy == FLAT:
        return
    policy = policy_model(config, run_models.sharding(config.mesh))
    for stage, made in (("ppo", _ppo), ("online_dpo", _online_dpo)):
        if stage in stages:
            _, shardings = place_roles(made(config, policy), settings.strategy, settings.roles, settings.generation_devices)
            if stage == "ppo":
                check_options(config.ppo, shardings)


def _ppo(config: Config, policy: Model, scorer: Model | None = None) -> PlacedRun:
    """The run of stage ppo. A judge behind a server has no role."""
    local = stage_judge(config, "ppo").on_all_processes
    records = reward_records(config.reward.source)
    return ppo_run(config.ppo, policy, any(r.is_model or (r.asks_judge and local) for r in records), scorer)


def _online_dpo(config: Config, policy: Model) -> PlacedRun:
    section, local = config.online_dpo, stage_judge(config, "online_dpo").on_all_processes
    step = section.batch // section.minibatches
    return PlacedRun(("policy", "reference", *("judge",) * local), step, 2 * step, policy)


def _place(context: StageContext, run: PlacedRun) -> Placed:
    settings = context.config.placement
    placement, shardings = place_roles(run, settings.strategy, settings.roles, settings.generation_devices)
    for line in placement.describe():
        print(f"[{context.title}] {line}", flush=True)
    return Placed(shardings, {"placement": placement.to_dict()})
