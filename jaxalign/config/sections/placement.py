"""The placement of the roles of stages ppo and online_dpo on the devices."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, one_of
from jaxalign.config.reading import when
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.placement.custom import parse_entry
from jaxalign.placement.resolve import AUTO, STRATEGIES


@dataclasses.dataclass(frozen=True)
class PlacementConfig(Section):
    """Which role of stages ppo and online_dpo runs on which devices (docs/placement.md). The placement changes results only by
    rounding."""

    strategy: str = field("flat", "flat: all roles on the devices of config.mesh, in turn; interleave: the reference and the "
                          "reward models on exclusive parts of these devices, at the same time; separate: training on the "
                          "first devices, with config.mesh, and sampling and scoring on the others; custom: the devices and "
                          "the mesh of each role are in config.placement.roles; auto: stage ppo chooses the placement that the "
                          "planner estimates to be the fastest on the run's devices.", one_of(*STRATEGIES, AUTO))
    generation_devices: int = field(0, "Number of devices for sampling and scoring; config.mesh has the others. 0: half.",
                                    at_least(0), when("strategy", "separate"))
    roles: tuple[str, ...] = field((), "Roles (policy, critic, reference, reward, judge, generator, value) with their devices "
                                   "and optionally their mesh, such as policy+critic=0-3:fsdp=4.", None,
                                   when("strategy", "custom"))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.strategy == "flat":
            return
        where = f"config.placement.strategy is {self.strategy!r}"
        for entry in self.roles:
            parse_entry(entry)
        if self.strategy == "custom" and not self.roles:
            raise UserError(f"{where}, but config.placement.roles is empty; give each role its devices, such as "
                            "policy+critic=0-3:fsdp=4")
        if not {"ppo", "online_dpo"} & set(config.stages):
            raise UserError(f"{where}, but config.stages has neither ppo nor online_dpo, the stages whose roles can be placed; "
                            "set the strategy to flat")
        for stage, section in (("ppo", "ppo"), ("online_dpo", "dpo")):
            if stage in config.stages and getattr(config, section).micro_batch_tokens == AUTO:
                raise UserError(f"{where}, and config.{section}.micro_batch_tokens is 'auto', which is chosen for one mesh of "
                                "all roles: set it to a number, or the strategy to flat")
        if config.mesh.keep_gathered != "never":
            raise UserError(f"{where}, but config.mesh.keep_gathered is {config.mesh.keep_gathered!r}, which works with "
                            "strategy flat only: set it to 'never', or the strategy to flat")
        if config.mesh.offload and self.strategy != AUTO:
            raise UserError(f"{where}, but config.mesh.offload is {config.mesh.offload}; offloading works with strategy flat "
                            "only: remove one of them")
