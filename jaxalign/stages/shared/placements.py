"""The placement of the roles of stage ppo: `config.placement`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding
from jaxalign.registry.rewards import reward_records
from jaxalign.rl.placing import place_roles
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import find_scorer


def placed_roles(context: StageContext, policy: Model) -> tuple[Mapping[str, Sharding], dict] | None:
    """(the mesh of each role, the placement as JSON values), printed; None if all roles share one mesh.

    policy: the policy's model on the run's mesh.

    Raises:
      UserError: the placement is not possible on the devices of this run.
    """
    config = context.config
    settings = config.placement
    if settings.strategy == "flat":
        return None
    records = reward_records(config.reward.source)
    scores = any(record.is_model or record.asks_judge for record in records)
    known = next((record.name for record in records if record.name in ("preference", "distilled")), None)
    scorer = None if known is None else find_scorer(context, known, policy, config.ppo.score_clip)[0].model
    placement, shardings = place_roles(
        config.ppo, policy, settings.strategy, scores=scores, scorer=scorer, entries=settings.roles,
        generation_devices=settings.generation_devices,
    )
    for line in placement.describe():
        print(f"[{context.title}] {line}", flush=True)
    return shardings, placement.to_dict()
