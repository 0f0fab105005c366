"""Places the roles of an RL run on the devices of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jaxalign.config import PPOConfig
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.role_meshes import role_shardings
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.machine import machine_of, numbered
from jaxalign.placement.meshes import Limits
from jaxalign.placement.plan import Placement
from jaxalign.placement.resolve import resolve
from jaxalign.rl.estimators import estimator_of

FLAT = "flat"


def place_roles(
    section: PPOConfig, policy: Model, strategy: str, *, scores: bool, scorer: Model | None = None,
    entries: Sequence[str] = (), generation_devices: int = 0,
) -> tuple[Placement, dict[str, Sharding]]:
    """(the placement, the mesh of each role) of an RL run.

    Args:
      section: `config.ppo`, or the settings of the trainer.
      policy: the policy's model on the run's mesh.
      strategy, entries, generation_devices: see `placement.resolve`; entries are those of custom.
      scores: whether the reward runs a model on devices of this run, which then has the role "reward".
      scorer: this model, whose sizes the mesh must divide; None: unknown.

    Raises:
      UserError: the placement is not possible.
    """
    owns_critic = estimator_of(section).needs_critic and section.critic == "separate"
    roles = ["policy", *["critic"] * owns_critic, "reference", *["reward"] * scores]
    devices, step = numbered(jax.devices()), section.batch // section.minibatches
    limits = {name: limits_of(policy, step if name in ("policy", "critic") else section.batch) for name in roles}
    if scores:
        limits["reward"] = Limits(rows=section.batch) if scorer is None else limits_of(scorer, section.batch)
    placement = resolve(
        strategy, roles, machine_of(devices), policy.sharding.mesh.shape, generation_devices=generation_devices,
        custom=entries, limits=limits,
    )
    shardings = role_shardings(placement, policy.sharding, devices)
    check_options(section, shardings)
    return placement, shardings


def limits_of(model: Model, rows: int) -> Limits:
    """The sizes that the mesh of a model must divide. rows: the rows of its batches."""
    config = model.config
    mlp = config.mlp if config.experts is None else config.experts.count
    return Limits(config.heads, config.kv_heads, rows, mlp, config.table_rows, config.embed, config.layers)


def check_options(section: PPOConfig, shardings: Mapping[str, Sharding]) -> None:
    """Raises UserError if one program must run two roles that have different meshes."""
    if section.kl_estimator == "full" and shardings["reference"].mesh != shardings["policy"].mesh:
        raise UserError("ppo.kl_estimator is 'full', which runs the policy and the reference in one program, but the placement "
                        "puts them on different meshes; give them the same devices and mesh, use placement flat, or set "
                        "kl_estimator to k1 or k3")
