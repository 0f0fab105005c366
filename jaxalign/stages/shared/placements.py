"""The placement of the roles of stages ppo and online_dpo: `config.placement`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.checks import check_world
from jaxalign.placement.resolve import AUTO
from jaxalign.planner.placed_runs import PLACED_STAGES, placed_online_dpo, placed_ppo
from jaxalign.planner.placement_auto import AutoPlacement, choose_attached
from jaxalign.planner.shapes import policy_model
from jaxalign.registry.rewards import reward_records
from jaxalign.rl.placing import FLAT, PlacedRun, check_options, place_roles
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.rewards import find_scorer
from jaxalign.tracking.workdir import read_object

CHOICE = "placement_choice.json"
"""The file of a stage's folder with the placement that strategy auto chose, which a resumed run keeps."""


class Placed(NamedTuple):
    """The mesh of each role, and the placement as JSON values; None and {} if all roles share the run's mesh. With strategy
    auto they may share another mesh, `together`."""

    shardings: Mapping[str, Sharding] | None
    values: dict[str, Any]
    together: Sharding | None = None

    def model(self, role: str, policy: Model) -> Model:
        """A model like the policy's on the mesh of a role; a role that is not placed has that of the policy."""
        if self.shardings is None:
            return policy if self.together is None else policy.on(self.together)
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
    run = placed_ppo(config, policy, scorer)
    if config.placement.strategy == AUTO:
        return _auto(context, run)
    settings = config.placement
    placed = _place(context, run, settings.strategy, settings.roles)
    check_options(config.ppo, placed.shardings)
    return placed


def online_dpo_placement(context: StageContext, policy: Model) -> Placed:
    """`ppo_placement` for stage online_dpo, whose judge has the role "judge" if it runs on devices of this run."""
    settings = context.config.placement
    if settings.strategy == AUTO:
        _print(context, ["placement auto: flat, because the search models the roles of stage ppo only"])
    if settings.strategy in (FLAT, AUTO):
        return Placed(None, {})
    return _place(context, placed_online_dpo(context.config, policy), settings.strategy, settings.roles)


def check_placements(config: Config, stages: Collection[str]) -> None:
    """Raises UserError before any of `stages` runs if the devices or the model of this run do not allow `config.placement`.
    Strategy auto is always possible: at worst it is flat."""
    settings = config.placement
    if settings.strategy in (FLAT, AUTO):
        return
    # Before JAX starts the devices, which all processes do together: only the first one calls this.
    check_world(settings.strategy, hosts.count())
    policy = policy_model(config, run_models.sharding(config.mesh))
    for stage, made in PLACED_STAGES.items():
        if stage in stages:
            _, shardings = place_roles(made(config, policy), settings.strategy, settings.roles, settings.generation_devices)
            if stage == "ppo":
                check_options(config.ppo, shardings)


def _auto(context: StageContext, run: PlacedRun) -> Placed:
    """The placement that strategy auto chooses: the one of the interrupted run if it still works, else the best one."""
    config, path = context.config, context.directory / CHOICE
    choice = _earlier(read_object(path), config, run)
    if choice is not None:
        _print(context, ["placement auto: that of the interrupted run is kept", *choice.sentences])
    else:
        choice = choose_attached(config, run.policy, jax.devices())
        write_json(path, choice.to_dict())
        _print(context, [f"placement auto: {sentence}" for sentence in choice.sentences])
    values = {"placement_choice": choice.to_dict()}
    if not choice.roles:
        return Placed(None, values)
    if choice.strategy == FLAT:  # All roles on one mesh, with the programs of flat.
        _, shardings = place_roles(run, "custom", choice.roles)
        return Placed(None, values, shardings["policy"])
    placed = _place(context, run, "custom", choice.roles)
    return placed._replace(values=placed.values | values)


def _earlier(values: Mapping[str, Any], config: Config, run: PlacedRun) -> AutoPlacement | None:
    """The choice of an interrupted run; None without one, or if this run's devices or config do not allow it."""
    try:
        choice = AutoPlacement.from_dict(values) if values else None
        if choice is not None and choice.roles:
            check_options(config.ppo, place_roles(run, "custom", choice.roles)[1])
        return choice
    except (UserError, TypeError):
        return None


def _place(context: StageContext, run: PlacedRun, strategy: str, entries: tuple[str, ...]) -> Placed:
    placement, shardings = place_roles(run, strategy, entries, context.config.placement.generation_devices)
    _print(context, placement.describe())
    return Placed(shardings, {"placement": placement.to_dict()})


def _print(context: StageContext, lines: list[str]) -> None:
    for line in lines if hosts.is_first() else ():
        print(f"[{context.title}] {line}", flush=True)
