"""Devices and networks, with their vendors' figures: chips, the torus of a TPU slice, GPU hosts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxalign.errors import UserError
from jaxalign.planner.gpu_topology import USABLE, GpuTopology, gpu_kinds
from jaxalign.planner.topology import GENERATIONS, Topology

_DATA = Path(__file__).with_name("hardware.json")
_GPUS = re.compile(r"(?P<name>.+?)x(?P<count>\d+)", re.IGNORECASE)
_GIB_OF = {"gpu": 1e9, "tpu": float(1 << 30)}  # GPU vendors state memory in units of 1e9 bytes, TPU vendors in GiB.


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: the chip's name.
      kind: "tpu" or "gpu".
      memory: bytes, as the vendor states them.
      usable: bytes of `memory` that are available to a program.
      bf16_flops, f32_flops: peak FLOP/s of matrix products at JAX's default precision (float32 runs in one bfloat16 pass on
        TPUs and in TF32 on GPUs).
      hbm: memory bandwidth in bytes/s.
      link: bandwidth in bytes/s, in one direction, of a torus link or of a GPU's NVLink or PCIe.
      torus_axes: the number of axes of a TPU slice; 0 for GPUs.
      chips_per_host: the number of chips in a host.
      linked: the number of GPUs that `link` connects: those of a host or, for GB200, of a rack.
      host_network: bytes/s out of a host; None if the vendor sells the chip without a network.
      wrap: when the axes of the torus wrap around: "cubes" (all, if each is a multiple of 4), "sixteen" (an axis of 16) or ""
        (never).
      largest: chips of the largest slice, or the largest number of GPUs that can be planned.
      source: the source of the figures.
    """

    name: str
    kind: str
    memory: float
    usable: float
    bf16_flops: float
    f32_flops: float
    hbm: float
    link: float
    torus_axes: int
    chips_per_host: int
    linked: int
    host_network: float | None
    wrap: str
    largest: int
    source: str

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in a dtype."""
        return self.f32_flops if dtype == "float32" else self.bf16_flops


@functools.cache
def chips() -> dict[str, Chip]:
    """Every known chip, by name."""
    table = json.loads(_DATA.read_text(encoding="utf-8"))
    return {
        name: Chip(
            name, row["kind"], row["memory_gb"] * _GIB_OF[row["kind"]], _usable(name, row), row["bf16_tflops"] * 1e12,
            row["f32_tflops"] * 1e12, row["hbm_gbs"] * 1e9, row["link_gbs"] * 1e9, row.get("torus_axes", 0),
            row["chips_per_host"], row.get("linked", row["chips_per_host"]),
            None if row["host_network_gbs"] is None else row["host_network_gbs"] * 1e9, row.get("wrap", ""), row["largest"],
            row["source"],
        )
        for name, row in table.items()
    }


_KINDS = {
    "v4": ("TPU v4",), "v5e": ("TPU v5 lite", "TPU v5e"), "v5p": ("TPU v5", "TPU v5p"), "v6e": ("TPU v6 lite", "TPU v6e"),
    "A100-40": ("A100-SXM4-40GB", "A100-PCIE-40GB"), "A100-80": ("A100-SXM4-80GB", "A100 80GB"), "H100-80": ("H100 80GB",),
    "H200": ("H200",), "B200": ("NVIDIA B200",), "GB200": ("GB200",), "L4": ("NVIDIA L4",), "RTX4090": ("RTX 4090",),
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip with this `device.device_kind`, or None if it is unknown."""
    for name, kinds in _KINDS.items():
        chip = chips()[name]
        if device_kind in kinds or (chip.kind == "gpu" and _names_gpu(name, device_kind)):
            return chip
    return None


def _usable(name: str, row: Mapping[str, Any]) -> float:
    """Bytes of a chip that are available to a program.

    Those of a TPU are from its compiler. Those of a GPU are the share `USABLE` of the memory that CUDA reports, or of the
    vendor's figure if that is not known.

    Args:
      name: the chip's name.
      row: its entry in the table of chips.
    """
    if row["kind"] == "tpu":
        return GENERATIONS[name].usable
    reported = [kind["device"]["device_memory_size"] for kind in gpu_kinds().values() if _names_gpu(name, kind["name"])]
    return USABLE * (reported[0] if reported else row["memory_gb"] * _GIB_OF["gpu"])


def _names_gpu(name: str, device_kind: str) -> bool:
    return any(kind in device_kind for kind in _KINDS[name])


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Identical chips.

    Attributes:
      chip: the chip.
      shape: the torus of a TPU slice, or (count,) for GPUs.
      slices: the number of TPU slices, connected by the hosts' network.
      usable: bytes of a device's memory available to a program.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int
    usable: float

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def name(self) -> str:
        if self.chip.kind == "gpu":
            return f"{self.chip.name}x{self.devices}"
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (f" x {self.slices} slices" if self.slices > 1 else "")

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.chip.chips_per_host)

    @property
    def far(self) -> float | None:
        """Bytes/s that each device can send to another slice or host while all devices send; None if unknown."""
        network = self.chip.host_network
        return None if network is None else network / self.chip.chips_per_host

    @property
    def closed(self) -> tuple[bool, ...]:
        """Whether each axis of the torus wraps around."""
        if self.chip.wrap == "cubes":
            return (all(size % 4 == 0 for size in self.shape),) * len(self.shape)
        return tuple(self.chip.wrap == "sixteen" and size == 16 for size in self.shape)


def tpu_cluster(topology: Topology) -> Cluster:
    """The chips of a topology (`planner.topology.parse_topology`). Raises UserError if no slice has that many chips."""
    chip = chips()[topology.generation]
    if topology.chips // topology.slices > chip.largest:
        raise UserError(f"topology {topology.name} has {topology.chips // topology.slices} chips; the largest slice of "
                        f"{chip.name} has {chip.largest}: connect several with config.mesh.slices")
    return Cluster(chip, topology.sizes, topology.slices, chip.usable)


def topology_cluster(topology: Topology | GpuTopology) -> Cluster:
    """The devices of a topology (`planner.topology.parse_topology`).

    Raises:
      UserError: no slice or cluster has that many chips, or no figures are known for the GPU of a description file.
    """
    return _described_gpus(topology) if isinstance(topology, GpuTopology) else tpu_cluster(topology)


def _described_gpus(topology: GpuTopology) -> Cluster:
    """The GPUs of a topology. The network of a host with a part of its GPUs is assumed to be the same part."""
    chip = chip_of(topology.device_kind)
    if chip is None:
        known = ", ".join(name for name, chip in chips().items() if chip.kind == "gpu")
        raise UserError(f"topology {topology.name} describes {topology.device_kind!r}, and the plan has only the rates of "
                        f"other GPUs ({known}); its name must contain one of theirs, as in 'NVIDIA H100 80GB HBM3'")
    hosts, gpus, most = topology.hosts, topology.gpus, chip.chips_per_host
    if gpus > most or most % gpus:
        counts = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise UserError(f"topology is {topology.name!r} with {gpus} GPUs per host; a host with {chip.name} has {counts}, as in "
                        f"{topology.kind}:{hosts}x{most}")
    if topology.chips > chip.largest or (hosts > 1 and chip.host_network is None):
        most = chip.largest if chip.host_network else most
        raise UserError(f"topology {topology.name} has {topology.chips} GPUs; at most {most} of {chip.name} can be planned")
    part = None if chip.host_network is None else chip.host_network * gpus / chip.chips_per_host
    linked = gpus if chip.linked == chip.chips_per_host else chip.linked
    chip = dataclasses.replace(chip, usable=topology.usable, chips_per_host=gpus, linked=linked, host_network=part)
    return Cluster(chip, (topology.chips,), 1, chip.usable)


def gpu_cluster(text: str) -> Cluster:
    """The GPUs that `text` names with their count, as in H100x8.

    Raises:
        UserError: the text is malformed, names an unknown or ambiguous GPU, or asks for several hosts of a GPU without a
          known network.
    """
    known = {name.lower(): chip for name, chip in chips().items() if chip.kind == "gpu"}
    names = ", ".join(chip.name for chip in known.values())
    match = _GPUS.fullmatch(text.strip())
    if match is None or not int(match["count"]):
        raise UserError(f"--gpus is {text!r}; expected a name and a count, as in H100-80x8; known GPUs: {names}")
    asked = match["name"].lower()
    matching = [name for name in known if name == asked] or [name for name in known if name.partition("-")[0] == asked]
    if len(matching) != 1:
        near = matching or difflib.get_close_matches(asked, known, n=1, cutoff=0.4)
        hint = f"; did you mean {' or '.join(known[name].name for name in near)}?" if near else ""
        raise UserError(f"--gpus is {text!r}, but {match['name']!r} does not name exactly one of the known GPUs: "
                        f"{names}{hint}")
    chip, count = known[matching[0]], int(match["count"])
    if count > chip.chips_per_host and chip.host_network is None:
        raise UserError(f"--gpus asks for {count} of {chip.name}, but no network between hosts is known for it; plan at most "
                        f"{chip.chips_per_host}, on one host")
    return Cluster(chip, (count,), 1, chip.usable)
