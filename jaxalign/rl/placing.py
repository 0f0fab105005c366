"""Places the roles of reinforcement learning on the devices of this run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jaxalign.config import PPOConfig
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.role_meshes import role_shardings
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.machine import Machine, machine_of, numbered
from jaxalign.placement.meshes import Limits
from jaxalign.placement.plan import Placement
from jaxalign.placement.resolve import resolve
from jaxalign.placement.roles import role_of
from jaxalign.rl.estimators import estimator_of

FLAT = "flat"


@dataclasses.dataclass(frozen=True)
class PlacedRun:
    """What a placement must suit.

    Attributes:
      roles: the roles without shadows.
      step: the rows of an optimizer step.
      batch: the rows that are sampled and scored together.
      policy: the policy's model on the run's mesh.
      scorer: the model of the role "reward", whose sizes its mesh must divide; None: unknown.
    """

    roles: tuple[str, ...]
    step: int
    batch: int
    policy: Model
    scorer: Model | None = None


def ppo_run(section: PPOConfig, policy: Model, scores: bool, scorer: Model | None = None) -> PlacedRun:
    """The run of stage ppo or of the trainer `PPO`.

    Args:
      section: `config.ppo`, or the settings of the trainer.
      policy, scorer: as in `PlacedRun`.
      scores: whether the reward runs a model on devices of this run, which then has the role "reward".
    """
    owns_critic = estimator_of(section).needs_critic and section.critic == "separate"
    roles = ("policy", *("critic",) * owns_critic, "reference", *("reward",) * scores)
    return PlacedRun(roles, section.batch // section.minibatches, section.batch, policy, scorer)


def place_roles(
    run: PlacedRun, strategy: str, entries: Sequence[str] = (), generation_devices: int = 0
) -> tuple[Placement, dict[str, Sharding]]:
    """(the placement, the mesh of each role) on the devices of this run.

    strategy, entries, generation_devices: see `placement.resolve`; entries are those of custom.

    Raises:
      UserError: the placement is not possible.
    """
    devices = numbered(jax.devices())
    placement = resolve_run(run, machine_of(devices), strategy, entries, generation_devices)
    return placement, role_shardings(placement, run.policy.sharding, devices)


def resolve_run(
    run: PlacedRun, machine: Machine, strategy: str, entries: Sequence[str] = (), generation_devices: int = 0
) -> Placement:
    """`placement.resolve` for a run on a machine. The other arguments are those of `place_roles`."""
    limits = {name: limits_of(run.policy, run.step if role_of(name).trained else run.batch) for name in run.roles}
    if "reward" in limits:
        limits["reward"] = Limits(rows=run.batch) if run.scorer is None else limits_of(run.scorer, run.batch)
    return resolve(
        strategy, run.roles, machine, run.policy.sharding.mesh.shape, generation_devices=generation_devices, custom=entries,
        limits=limits,
    )


def limits_of(model: Model, rows: int) -> Limits:
    """The sizes that the mesh of a model must divide. rows: the rows of its batches."""
    config = model.config
    mlp = config.mlp if config.experts is None else config.experts.count
    return Limits(config.heads, config.kv_heads, rows, mlp, config.table_rows, config.embed, config.layers)


def check_options(section: PPOConfig, shardings: Mapping[str, Sharding]) -> None:
    """Raises UserError if ppo.kl_estimator is 'full' and the placement has no program that runs policy and reference together:
    they have different meshes, or the KL is part of the reward, since the programs of the forward passes run one model each."""
    if section.kl_estimator != "full":
        return
    if section.kl_in == "reward":
        raise UserError("ppo.kl_estimator is 'full' with ppo.kl_in 'reward', which runs the policy and the reference in one "
                        "forward pass, but with placements each role has its own; set kl_in to 'loss', use placement flat, or "
                        "set kl_estimator to k1 or k3")
    if shardings["reference"].mesh != shardings["policy"].mesh:
        raise UserError("ppo.kl_estimator is 'full', which runs the policy and the reference in one program, but the placement "
                        "puts them on different meshes; give them the same devices and mesh, use placement flat, or set "
                        "kl_estimator to k1 or k3")
