"""Topologies by name, those of the flag --topology, and their devices, for which programs compile on any Linux machine.

This module has those of TPUs, for the compiler in `libtpu`; `gpu_topology` has those of GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies

from jaxalign.errors import UserError
from jaxalign.placement.roles import role_of
from jaxalign.planner.gpu_topology import GpuTopology, gpu_kinds, gpu_topology_devices, names_gpus, parse_gpu_topology

GIB = 1 << 30
_FORM = re.compile(r"(?P<generation>[a-z0-9]+):(?P<sizes>\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of TPUs.

    Attributes:
      axes: the number of axes of its torus or mesh of chips.
      usable: bytes of a chip's memory available to a program, from the compiler's out-of-memory errors (libtpu 0.0.52).
      options: options of the compiler in addition to the shape.
    """

    axes: int
    usable: int
    options: tuple[tuple[str, str], ...] = ()


# The two cores of a v4 or v5p chip act as one device, as on real machines.
_MEGACORE = (("chip_config_name", "megacore"),)
# Allow several processes to compile in parallel: none of them holds a TPU. Prevent the compiler from querying the machine about
# its TPU, which fails with long messages.
_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
GENERATIONS = {
    "v4": Generation(3, int(30.75 * GIB), _MEGACORE),
    "v5e": Generation(2, int(15.75 * GIB)),
    "v5p": Generation(3, int(95.73 * GIB), _MEGACORE),
    "v6e": Generation(2, int(31.24 * GIB)),
}


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""The shapes of slices of generations with two axes (cloud.google.com/tpu/docs/v5e and v6e)."""
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Those of generations with three axes and fewer than 64 chips. The axes of larger ones are multiples of 4 in increasing order
(cloud.google.com/tpu/docs/v4 and v5p)."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice such as `v5e:4x4`, with `sizes` in chips, or `slices` such slices connected by the slower network."""

    generation: str
    sizes: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.sizes) * self.slices

    @property
    def name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.sizes))}"

    @property
    def usable(self) -> int:
        """Bytes of one chip's memory available to a program."""
        return GENERATIONS[self.generation].usable


def parse_topology(text: str, slices: int = 1) -> Topology | GpuTopology:
    """The topology that `text` names: of TPUs, such as v5e:4x4, v6e:8x8, v4:2x2x4 or v5p:4x4x8, or of GPUs, such as h100:1x8 or
    FILE:1x8 (`parse_gpu_topology`).

    Raises:
      UserError: the text is malformed, or its generation or shape does not exist.
    """
    if names_gpus(text):
        return parse_gpu_topology(text, slices)
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UserError(f"topology is {text!r}; expected a generation and the chips along each axis, as in v5e:4x4 or "
                        "v5p:4x4x8, or a kind of GPU, the hosts and the GPUs of each host, as in h100:1x8")
    generation, sizes = match["generation"], tuple(map(int, match["sizes"].split("x")))
    if generation not in GENERATIONS:
        near = difflib.get_close_matches(generation, (*GENERATIONS, *gpu_kinds()), n=1, cutoff=0.5)
        raise UserError(f"topology is {text!r}, but {generation!r} is not one of the known TPU generations: "
                        f"{', '.join(GENERATIONS)}, or GPUs: {', '.join(gpu_kinds())}"
                        f"{f'; did you mean {near[0]}?' if near else ''}")
    axes = GENERATIONS[generation].axes
    if len(sizes) != axes:
        raise UserError(f"topology is {text!r} with {len(sizes)} axes; {generation} has {axes}, as in "
                        f"{generation}:{'x'.join(('4', '4', '8')[:axes])}")
    # `hardware.tpu_cluster` rejects a slice that is too large.
    if axes == 2:
        offered = sizes in _FLAT or math.prod(sizes) > math.prod(_FLAT[-1])
    else:
        offered = sizes in _DEEP or (0 not in sizes and sizes == tuple(sorted(sizes)) and all(size % 4 == 0 for size in sizes))
    if not offered:
        chips = math.prod(sizes)
        larger = [shape for shape in (_FLAT if axes == 2 else _DEEP) if math.prod(shape) >= chips]
        # Beyond the listed shapes, each axis is rounded up to a multiple of 4.
        following = larger[0] if larger else tuple(sorted(-(-size // 4) * 4 for size in sizes))
        raise UserError(f"topology is {text!r}, but {generation} is not offered in this shape; the next larger one is "
                        f"{generation}:{'x'.join(map(str, following))}")
    return Topology(generation, sizes, slices)


RoleTopology = tuple[tuple[str, ...], Topology | GpuTopology]
"""(the roles on a topology, the topology); no roles for a topology of all of them."""


def parse_topologies(text: str, slices: int = 1) -> list[RoleTopology]:
    """Reads "v5p:2x2x4"; "policy+critic=v5p:2x2x4,generator+reference+reward=v5e:2x4" for groups of roles; or
    "v5p:2x2x4,v5e:2x4" for several machines without roles.

    Raises:
      UserError: the text is malformed, a topology or a role does not exist, or a role has two topologies.
    """
    if "," not in text and "=" not in text:
        return [((), parse_topology(text, slices))]
    groups: list[RoleTopology] = []
    for part in text.split(","):
        names, equals, topology = part.strip().partition("=")
        if not equals and "=" in text:
            raise UserError(f"--topology has {part!r}; expected roles and their topology, as in policy+critic=v5p:2x2x4")
        roles, topology = (tuple(names.split("+")), topology) if equals else ((), part.strip())
        for role in roles:
            role_of(role)
            if any(role in others for others, _ in groups) or roles.count(role) > 1:
                raise UserError(f"--topology names {role} twice; give each role one topology")
        groups.append((roles, parse_topology(topology)))
    if slices > 1:
        raise UserError(f"config.mesh.slices is {slices}, but --topology has several topologies; set config.mesh.slices to 1")
    return groups


def require_placement(groups: Sequence[RoleTopology], strategy: str) -> None:
    """Raises UserError if roles have topologies of their own without a placement that says so."""
    if strategy in ("flat", "auto") and any(roles for roles, _ in groups):
        first, entries = 0, []
        for roles, topology in groups:
            entries.append(f"{'+'.join(roles)}={first}-{first + topology.chips - 1}")
            first += topology.chips
        raise UserError(f"--topology gives roles their own devices, but config.placement.strategy is {strategy}; set it to "
                        f"custom, with --config.placement.roles={','.join(entries)} or such entries with meshes")


def topology_devices(topology: Topology | GpuTopology, needed: int | None = None) -> list[jax.Device]:
    """The devices of a topology, in the compiler's order. Programs compile for them, but cannot run on them.

    needed: the number of devices of the mesh; None returns all.

    Raises:
      UserError: the compiler is not installed or rejects the shape, or the mesh has more devices than the topology.
    """
    if needed is not None and needed > topology.chips:
        raise UserError(f"the mesh has {needed} devices, but topology {topology.name} has {topology.chips}; make config.mesh "
                        "smaller or the topology larger")
    devices = gpu_topology_devices(topology) if isinstance(topology, GpuTopology) else _tpu_devices(topology)
    return devices[:needed]


def _tpu_devices(topology: Topology) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"the TPU compiler, which --compile needs for {topology.name}, is not installed; run: "
                        "pip install 'jaxalign[aot]'")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = dict(GENERATIONS[topology.generation].options)
    if topology.sizes == (1, 1):
        options["chips_per_host_bounds"] = (*topology.sizes, 1)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    try:
        with _tpu_flags():
            devices = topologies.get_topology_desc(topology.name, "tpu", **options).devices
            # The compiler reads XLA_FLAGS once, when it compiles its first program.
            scalar = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(devices[0]))
            jax.jit(lambda x: x).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the TPU compiler rejects topology {topology.name}: {str(error).splitlines()[0]}") from error
    return list(devices)


@contextlib.contextmanager
def _tpu_flags() -> Iterator[None]:
    """Hides the CPU and GPU options in XLA_FLAGS: the TPU compiler ends the process on an option that it does not know."""
    given = os.environ.get("XLA_FLAGS")
    if given is None:
        yield
        return
    os.environ["XLA_FLAGS"] = " ".join(word for word in given.split() if not word.startswith(("--xla_cpu_", "--xla_gpu_")))
    try:
        yield
    finally:
        os.environ["XLA_FLAGS"] = given
