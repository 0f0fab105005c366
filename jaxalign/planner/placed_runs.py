"""The roles of the stages that `config.placement` places."""

from __future__ import annotations

from collections.abc import Callable

from jaxalign.config import Config
from jaxalign.models.model import Model
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.rewards import reward_records
from jaxalign.rl.placing import PlacedRun, ppo_run


def placed_ppo(config: Config, policy: Model, scorer: Model | None = None) -> PlacedRun:
    """The run of stage ppo. A judge behind a server has no role. scorer: the reward model, if it is known."""
    local = stage_judge(config, "ppo").on_all_processes
    records = reward_records(config.reward.source)
    return ppo_run(config.ppo, policy, any(r.is_model or (r.asks_judge and local) for r in records), scorer)


def placed_online_dpo(config: Config, policy: Model) -> PlacedRun:
    """The run of stage online_dpo, whose judge has the role "judge" if it runs on devices of this run."""
    section, local = config.online_dpo, stage_judge(config, "online_dpo").on_all_processes
    step = section.batch // section.minibatches
    return PlacedRun(("policy", "reference", *("judge",) * local), step, 2 * step, policy)


PLACED_STAGES: dict[str, Callable[[Config, Model], PlacedRun]] = {"ppo": placed_ppo, "online_dpo": placed_online_dpo}
"""By stage, the function that returns its run."""
