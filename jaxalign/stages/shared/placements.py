"""The placement of the roles of stages ppo and online_dpo: `config.placement`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.rewards import reward_records
from jaxalign.rl.placing import FLAT, PlacedRun, check_options, place_roles, ppo_run
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
    records = reward_records(config.reward.source)
    scores = any(record.is_model or record.asks_judge for record in records)
    known = next((record.name for record in records if record.name in ("preference", "distilled")), None)
    scorer = None if known is None else find_scorer(context, known, policy, config.ppo.score_clip)[0].model
    placed = _place(context, ppo_run(config.ppo, policy, scores, scorer))
    check_options(config.ppo, placed.shardings)
    return placed


def online_dpo_placement(context: StageContext, policy: Model) -> Placed:
    """`ppo_placement` for stage online_dpo, whose judge has the role "judge" if it runs on devices of this run."""
    config, section = context.config, context.config.online_dpo
    if config.placement.strategy == FLAT:
        return Placed(None, {})
    judges = ("judge",) * stage_judge(config, "online_dpo").on_all_processes
    step = section.batch // section.minibatches
    return _place(context, PlacedRun(("policy", "reference", *judges), step, 2 * step, policy))


def _place(context: StageContext, run: PlacedRun) -> Placed:
    settings = context.config.placement
    placement, shardings = place_roles(run, settings.strategy, settings.roles, settings.generation_devices)
    for line in placement.describe():
        print(f"[{context.title}] {line}", flush=True)
    return Placed(shardings, {"placement": placement.to_dict()})
