"""Whether a run fits into the memory of this machine, by the planner's arithmetic."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import psutil

from jaxalign.config import Config
from jaxalign.planner.estimate import abstract_sharding, estimate
from jaxalign.planner.hardware import Chip, Cluster
from jaxalign.planner.shapes import policy_model

USABLE = 0.9
"""The share of the host's available memory that a run on the CPU may plan with; the rest is for the program itself."""


class Fit(NamedTuple):
    """The memory of a run.

    task: the task with the highest peak. peak: its bytes. usable: bytes that the device has. device: its name.
    """

    task: str
    peak: float
    usable: float
    device: str

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    def sentence(self) -> str:
        """States the peak and the memory."""
        return f"{self.task} needs {self.peak / 1e9:.2f} GB of the {self.usable / 1e9:.2f} GB free on {self.device}"


def this_device() -> Cluster:
    """The first device of this machine as a cluster of one. Only its memory is known; its times are not used."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    usable = float(limit) if limit else USABLE * psutil.virtual_memory().available
    name = f"this machine ({device.device_kind})" if device.platform == "cpu" else device.device_kind
    chip = Chip(name, device.platform, usable, 1.0, 1.0, 1.0, 1.0, 0, 1, 1, None, "", 1, "this machine")
    return Cluster(chip, (1,), 1, usable)


def fit(config: Config, cluster: Cluster) -> Fit:
    """Estimates the largest peak of a run on one device; nothing is compiled.

    Args:
      config: the run's config.
      cluster: the device.
    """
    policy = policy_model(config, abstract_sharding(config.mesh))
    if cluster.chip.kind == "cpu":  # A CPU has no fused attention, so the scores of all heads are in memory.
        policy = dataclasses.replace(policy, config=dataclasses.replace(policy.config, attention="plain"))
    worst = max(estimate(config, policy, cluster).tasks, key=lambda task: task.peak)
    return Fit(f"stage {worst.task.stage}", worst.peak, cluster.usable, cluster.chip.name)
