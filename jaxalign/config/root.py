"""The whole config: its sections, how it is read, and the checks that concern several sections."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import config_dict

from jaxalign.config import schema
from jaxalign.config.division import check_multiple
from jaxalign.config.schema import between, field, section, some_of
from jaxalign.config.sections.arithmetic import Arithmetic
from jaxalign.config.sections.best_of_n import BestOfN
from jaxalign.config.sections.compare import Compare
from jaxalign.config.sections.data import Data
from jaxalign.config.sections.dpo import Dpo
from jaxalign.config.sections.evaluate import Evaluate
from jaxalign.config.sections.feedback import Feedback
from jaxalign.config.sections.lora import Lora
from jaxalign.config.sections.mesh import Mesh
from jaxalign.config.sections.model import Model
from jaxalign.config.sections.online_dpo import OnlineDpo
from jaxalign.config.sections.ppo import Ppo
from jaxalign.config.sections.preference import Preference
from jaxalign.config.sections.pretrain import Pretrain
from jaxalign.config.sections.revise import Revise
from jaxalign.config.sections.reward import Reward
from jaxalign.config.sections.reward_distill import RewardDistill
from jaxalign.config.sections.sft import Sft
from jaxalign.config.sections.tracking import Tracking
from jaxalign.config.sections.world import World
from jaxalign.config.selectors import traced_steps
from jaxalign.errors import UserError

STAGES = ("pretrain", "revise", "sft", "compare", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo",
          "evaluate", "report")
"""Every stage, in the order of the graph."""
DEFAULT_STAGES = ("pretrain", "revise", "sft", "compare", "preference", "ppo", "evaluate", "report")
POLICY_STAGES = ("sft", "best_of_n", "dpo", "online_dpo", "ppo")
"""The stages that make a policy; each starts from the last one before it in the run."""
_SAMPLING = ("revise", "compare", "reward_distill", "best_of_n", "online_dpo", "ppo", "evaluate")
_STEPPING = ("pretrain", "sft", "preference", "reward_distill", "best_of_n", "dpo", "online_dpo", "ppo")
_UNUSED = {"adamw": (), "lion": ("eps", "eps_inside"), "muon": ("eps_inside",),
           "adafactor": ("b1", "b2", "eps", "eps_inside"), "sophia": ("eps_inside",)}


@dataclasses.dataclass(frozen=True)
class Config:
    """All of a run's settings."""

    seed: int = field(0, "Every random number of the run follows from it.", between(0, 2**31 - 1))
    stages: tuple[str, ...] = field(DEFAULT_STAGES, "The stages to run, in this order.", some_of(*STAGES))
    compile_cache: str | None = field("", "Folder of compiled programs; empty: ~/.cache/jaxalign, None: off.")
    profile: str = field("", "Steps to trace, as STAGE:STEP:COUNT (ppo:10:3), into the stage's folder `profile`; empty: none.")
    mesh: Mesh = section(Mesh(), "")
    model: Model = section(Model(), "")
    lora: Lora = section(Lora(), "")
    data: Data = section(Data(), "")
    world: World = section(World(), "")
    arithmetic: Arithmetic = section(Arithmetic(), "")
    pretrain: Pretrain = section(Pretrain(), "")
    revise: Revise = section(Revise(), "")
    sft: Sft = section(Sft(), "")
    feedback: Feedback = section(Feedback(), "")
    compare: Compare = section(Compare(), "")
    preference: Preference = section(Preference(), "")
    reward_distill: RewardDistill = section(RewardDistill(), "")
    best_of_n: BestOfN = section(BestOfN(), "")
    dpo: Dpo = section(Dpo(), "")
    online_dpo: OnlineDpo = section(OnlineDpo(), "")
    reward: Reward = section(Reward(), "")
    ppo: Ppo = section(Ppo(), "")
    evaluate: Evaluate = section(Evaluate(), "")
    tracking: Tracking = section(Tracking(), "")


def default_config() -> config_dict.ConfigDict:
    """The defaults, for a config file to change. It accepts any key and type; `from_config_dict` checks them."""
    return schema.to_config_dict(Config())


def from_config_dict(values: config_dict.ConfigDict | dict[str, Any]) -> Config:
    """The frozen, typed config. Fields that `values` leaves out keep their defaults.

    Raises:
        UserError: an unknown key, a wrong type, a value out of range, or values that do not fit together.
    """
    config = schema.from_mapping(Config(), values)
    check(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dictionaries of JSON values; `from_config_dict` reads it back."""
    return schema.to_plain(config)


def check(config: Config) -> None:
    """Raises UserError at the first fields that do not fit together.

    Sections of stages that are not in `config.stages` are not checked: a mesh need not divide a batch that is never made.
    """
    _check_profile(config)
    for name in schema.field_types(Config):
        if schema.is_section(type(getattr(config, name))) and (name not in STAGES or name in config.stages):
            _check_section(getattr(config, name), config, name)
    for stage in config.stages:
        for batch in getattr(config, stage).batches() if hasattr(config, stage) else ():
            _check_batch(config, stage, batch.field, batch.parts)


def _check_profile(config: Config) -> None:
    if not config.profile:
        return
    stage = traced_steps(config.profile)[0]
    able = [name for name in config.stages if name in _STEPPING]
    if stage not in able:
        raise UserError(f"config.profile is {config.profile!r}, but of the stages of this run {', '.join(able) or 'none'} "
                        "can be traced: those that train in steps")


def _check_section(part: Any, config: Config, name: str) -> None:
    """Checks a section and the sections inside it."""
    part.check(config, name)
    for inner in schema.field_types(type(part)):
        value = getattr(part, inner)
        if schema.is_section(type(value)):
            _check_section(value, config, f"{name}.{inner}")
            if type(value).__name__ == "Optimizer":
                _check_unused(value, schema.get(Config(), f"{name}.{inner}"), f"{name}.{inner}")


def _check_unused(chosen: Any, usual: Any, name: str) -> None:
    """Refuses a setting that the optimizer's kind does not read."""
    for unused in _UNUSED[chosen.kind]:
        value, default = getattr(chosen, unused), getattr(usual, unused)
        if value != default:
            raise UserError(f"config.{name}.{unused} is {value}, which {chosen.kind} does not read: leave it at "
                            f"{default}")


def _check_batch(config: Config, stage: str, rows: str, parts: tuple[str, ...]) -> None:
    """Checks that a batch divides into its parts, over the mesh, and over the devices that sample."""
    mesh, owner = config.mesh, getattr(config, stage)
    split = {f"config.mesh.{axis}": getattr(mesh, axis) for axis in ("data", "fsdp")}
    factors = {f"config.{stage}.{part}": getattr(owner, part) or 1 for part in parts} | split
    factors["config.mesh.pipeline_micro_batches"] = mesh.pipeline_micro_batches or mesh.pipeline
    check_multiple(f"config.{stage}.{rows}", getattr(owner, rows), factors)
    if stage in _SAMPLING:  # While it is sampled, a row lies on one device of these axes.
        axes = ("pipeline", "context", "tensor") if mesh.generation == "whole" else ("pipeline", "context")
        factors = split | {f"config.mesh.{axis}": getattr(mesh, axis) for axis in axes}
        check_multiple(f"config.{stage}.{rows}", getattr(owner, rows), factors)
