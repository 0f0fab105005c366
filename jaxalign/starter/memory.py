"""Whether a run fits into the memory of this machine, by the planner's arithmetic."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import psutil

from jaxalign.config import Config
from jaxalign.planner.estimate import abstract_sharding, check_divides, estimate
from jaxalign.planner.hardware import Chip, Cluster
from jaxalign.planner.shapes import policy_model

USABLE = 0.9
"""The share of the host's available memory that a run on the CPU may plan with; the rest is for the program itself."""


class Fit(NamedTuple):
    """The memory of a run.

    task: the task with the highest peak. peak: its bytes on a device. usable: bytes that a device has. device: its name.
    devices: the number of devices.
    """

    task: str
    peak: float
    usable: float
    device: str
    devices: int = 1

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    def sentence(self) -> str:
        """States the peak and the memory."""
        each = f"each of {self.devices} devices of " if self.devices > 1 else ""
        return f"{self.task} needs {self.peak / 1e9:.2f} GB of the {self.usable / 1e9:.2f} GB free on {each}{self.device}"


MOST_DEVICES = 8
"""The devices of a written config: its batches are multiples of this number."""


def these_devices() -> Cluster:
    """The devices of this machine as a cluster: a power of 2, and at most `MOST_DEVICES`. Only their memory is known; their
    times are not used. Of CPU devices, which share cores and memory, it is one."""
    devices = jax.local_devices()
    device, count = devices[0], 1
    if device.platform != "cpu":
        count = 1 << (min(MOST_DEVICES, len(devices)).bit_length() - 1)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    usable = float(limit) if limit else USABLE * psutil.virtual_memory().available
    name = f"this machine ({device.device_kind})" if device.platform == "cpu" else device.device_kind
    return cluster_of(name, device.platform, usable, count)


def cluster_of(name: str, platform: str, usable: float, count: int) -> Cluster:
    """Devices of a machine, of which only the memory is known. usable: bytes of each."""
    chip = Chip(name, platform, usable, usable, 1.0, 1.0, 1.0, 1.0, 1, count, count, 1.0, "", count, "this machine")
    return Cluster(chip, (count,), 1, usable)


def fit(config: Config, cluster: Cluster) -> Fit:
    """Estimates the largest peak of a run on one of its devices; nothing is compiled.

    Args:
      config: the run's config.
      cluster: the devices.

    Raises:
      UserError: the mesh does not divide the model.
    """
    policy = policy_model(config, abstract_sharding(config.mesh))
    check_divides(policy, config.mesh)
    if cluster.chip.kind == "cpu":  # A CPU has no fused attention, so the scores of all heads are in memory.
        policy = dataclasses.replace(policy, config=dataclasses.replace(policy.config, attention="plain"))
    worst = max(estimate(config, policy, cluster).tasks, key=lambda task: task.peak)
    return Fit(f"stage {worst.task.stage}", worst.peak, cluster.usable, cluster.chip.name, cluster.devices)
