"""Devices and networks by their vendors' figures: chips, the torus of a TPU slice, hosts of GPUs."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
from pathlib import Path

from jaxalign.errors import UserError
from jaxalign.planner.topology import Topology

_DATA = Path(__file__).with_name("hardware.json")
_GPUS = re.compile(r"(?P<name>.+?)x(?P<count>\d+)", re.IGNORECASE)
_GIB_OF = {"gpu": 1e9, "tpu": float(1 << 30)}  # Vendors of GPUs count in 1e9, the memory of TPUs is in GiB.


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: the chip's name.
      kind: "tpu" or "gpu".
      memory: bytes.
      bf16_flops, f32_flops: peak FLOP/s of matrix products at JAX's default precision (float32 in one pass of bfloat16 on
        TPUs, in TF32 on GPUs).
      hbm: bytes/s of its memory.
      link: bytes/s in one direction of a torus link, or of a GPU's NVLink or PCIe.
      torus_axes: axes of a TPU slice; 0 for GPUs.
      chips_per_host: chips of a host.
      host_network: bytes/s out of a host; None where the vendor sells no network with it.
      wrap: when the torus closes: "cubes" (every axis is a multiple of 4), "sixteen" (an axis of 16) or "" (never).
      largest: chips of the largest slice, or the most GPUs that are planned.
      source: where the figures are from.
    """

    name: str
    kind: str
    memory: float
    bf16_flops: float
    f32_flops: float
    hbm: float
    link: float
    torus_axes: int
    chips_per_host: int
    host_network: float | None
    wrap: str
    largest: int
    source: str

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of that dtype."""
        return self.f32_flops if dtype == "float32" else self.bf16_flops


@functools.cache
def chips() -> dict[str, Chip]:
    """Every chip known, by name."""
    table = json.loads(_DATA.read_text(encoding="utf-8"))
    return {
        name: Chip(
            name, row["kind"], row["memory_gb"] * _GIB_OF[row["kind"]], row["bf16_tflops"] * 1e12, row["f32_tflops"] * 1e12,
            row["hbm_gbs"] * 1e9, row["link_gbs"] * 1e9, row.get("torus_axes", 0), row["chips_per_host"],
            None if row["host_network_gbs"] is None else row["host_network_gbs"] * 1e9, row.get("wrap", ""), row["largest"],
            row["source"],
        )
        for name, row in table.items()
    }  # fmt: skip


_KINDS = {
    "v4": ("TPU v4",), "v5e": ("TPU v5 lite", "TPU v5e"), "v5p": ("TPU v5", "TPU v5p"), "v6e": ("TPU v6 lite", "TPU v6e"),
    "A100-40": ("A100-SXM4-40GB", "A100-PCIE-40GB"), "A100-80": ("A100-SXM4-80GB", "A100 80GB"), "H100-80": ("H100 80GB",),
    "H200": ("H200",), "L4": ("NVIDIA L4",), "RTX4090": ("RTX 4090",),
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip with that `device.device_kind`, or None where it is not known."""
    for name, kinds in _KINDS.items():
        chip = chips()[name]
        if device_kind in kinds or (chip.kind == "gpu" and any(kind in device_kind for kind in kinds)):
            return chip
    return None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Equal chips: `shape` is the torus of a TPU slice, or (count,) for GPUs; `slices` of it are joined by the hosts' network.

    usable: bytes of a device's memory that a program may take.
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
        """Bytes/s that each device can send to another slice or host while all do; None where it is not known."""
        network = self.chip.host_network
        return None if network is None else network / self.chip.chips_per_host

    @property
    def closed(self) -> tuple[bool, ...]:
        """Whether each axis of the torus wraps around."""
        if self.chip.wrap == "cubes":
            return (all(size % 4 == 0 for size in self.shape),) * len(self.shape)
        return tuple(self.chip.wrap == "sixteen" and size == 16 for size in self.shape)


def tpu_cluster(topology: Topology) -> Cluster:
    """The chips of a topology (`planner.topology.parse_topology`). Raises UserError where no slice has that many chips."""
    chip = chips()[topology.generation]
    if topology.chips // topology.slices > chip.largest:
        raise UserError(f"topology {topology.name} has {topology.chips // topology.slices} chips; the largest slice of "
                        f"{chip.name} has {chip.largest}: join several with config.mesh.slices")
    return Cluster(chip, topology.sizes, topology.slices, topology.usable)


def gpu_cluster(text: str) -> Cluster:
    """GPUs by name and count, as in H100x8.

    Raises:
        UserError: another form, or a GPU that is not known.
    """
    known = {name.lower(): chip for name, chip in chips().items() if chip.kind == "gpu"}
    match = _GPUS.fullmatch(text.strip())
    if match is None or not int(match["count"]):
        raise UserError(f"--gpus is {text!r}; a name and a count are expected, as in H100-80x8; known are {_names(known)}")
    asked = match["name"].lower()
    found = [name for name in known if name == asked] or [name for name in known if name.partition("-")[0] == asked]
    if len(found) != 1:
        near = found or difflib.get_close_matches(asked, known, n=1, cutoff=0.4)
        hint = f"; did you mean {' or '.join(known[name].name for name in near)}?" if near else ""
        raise UserError(f"--gpus is {text!r}, but {match['name']!r} is not one GPU known here: {_names(known)}{hint}")
    chip, count = known[found[0]], int(match["count"])
    if count > chip.chips_per_host and chip.host_network is None:
        raise UserError(f"--gpus asks for {count} of {chip.name}, for which no network between hosts is known; at most "
                        f"{chip.chips_per_host} in one host can be planned")
    return Cluster(chip, (count,), 1, chip.memory)


def _names(known: dict[str, Chip]) -> str:
    return ", ".join(chip.name for chip in known.values())
