"""GPU topologies by name, for the GPU compiler, which JAX's CUDA plugin provides on any Linux machine, even without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxalign.commands import MEMORY_SHARE
from jaxalign.errors import UserError
from jaxalign.parallel.device_memory import WITHOUT_GAPS, describe_memory

_DATA = Path(__file__).with_name("gpu_targets.json")
_FORM = re.compile(r"(?P<kind>.+):(?P<hosts>\d+)x(?P<gpus>\d+)")
_FIELD = re.compile(r'\b(\w+)\s*:\s*("(?:[^"\\]|\\.)*"|[^\s{}]+)')
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_INSTALL = "pip install 'jaxalign[aot-cuda]'"
# Without a GPU the versions of CUDA's libraries do not matter, except that of cuDNN, whose kernels the compiler selects.
_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
OPTIONS = {"xla_gpu_autotune_level": 0}
"""Options of the GPU compiler without a GPU: it cannot measure kernels, so it does not choose among them by time."""
USABLE = MEMORY_SHARE * WITHOUT_GAPS
"""The share of a GPU's memory that is available to programs. 5% is outside of JAX's allocator (`commands.reserve_memory`): the
driver's context, the code of kernels, NCCL's buffers, and cuBLAS's workspaces. This share is an assumption."""


@dataclasses.dataclass(frozen=True)
class GpuTopology:
    """Hosts with GPUs, such as `h100:4x8`.

    Attributes:
      kind: the name in `gpu_kinds`, or the file of a description.
      hosts: the number of hosts.
      gpus: the number of GPUs in each host.
      target: the description for the compiler, a GpuTargetConfigProto as text.
      device_kind: the name of the GPU, as in `jax.Device.device_kind`.
      memory: bytes of a GPU's memory, as CUDA reports them.
    """

    kind: str
    hosts: int
    gpus: int
    target: str = dataclasses.field(repr=False)
    device_kind: str
    memory: int

    @property
    def chips(self) -> int:
        return self.hosts * self.gpus

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.hosts}x{self.gpus}"

    @property
    def usable(self) -> int:
        """Bytes of a GPU's memory available to a program (`USABLE`)."""
        return int(USABLE * self.memory)


@functools.cache
def gpu_kinds() -> dict[str, dict[str, Any]]:
    """The descriptions of the known GPUs by kind: A100, H100, H200, B200 and GB200."""
    table = json.loads(_DATA.read_text(encoding="utf-8"))
    common = table.pop("common")
    return {kind: row | {"device": common | row["device"]} for kind, row in table.items()}


def target_text(row: dict[str, Any]) -> str:
    """The description in an entry of `gpu_kinds` as a GpuTargetConfigProto in text form."""
    major, minor, features = row["compute_capability"]
    lines = [f"  {name}: {value}" for name, value in row["device"].items()]
    lines += [f"  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}"]
    lines += [f'  {name}: "12.8.0"' for name in ("runtime_version", "driver_version", "compile_time_toolkit_version")]
    lines += ['  dnn_version: "9.10.0"', f'  name: "{row["name"]}"']
    return "\n".join(["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"',
                      "dnn_version_info { major: 9 minor: 10 patch: 0 }", f'device_description_str: "{row["name"]}"', ""])


def names_gpus(text: str) -> bool:
    """Whether a topology names GPUs: a known kind, or a file."""
    kind = text.strip().partition(":")[0].lower()
    return kind in gpu_kinds() or "/" in text or "." in text


def parse_gpu_topology(text: str, slices: int = 1) -> GpuTopology:
    """The topology that `text` names: KIND:HOSTSxGPUS, as in h100:4x8, or FILE:HOSTSxGPUS with a description file.

    Args:
      text: the name.
      slices: the number of groups of hosts (config.mesh.slices).

    Raises:
      UserError: the text is malformed, a number is 0, slices does not divide the hosts, or the description is incomplete.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not int(match["hosts"]) or not int(match["gpus"]):
        raise UserError(f"topology is {text!r}; expected a kind of GPU, the hosts and the GPUs of each host, as in h100:1x8")
    hosts, gpus = int(match["hosts"]), int(match["gpus"])
    if hosts % slices:
        raise UserError(f"topology is {text!r} with {hosts} hosts, which config.mesh.slices ({slices}) does not divide; use a "
                        "multiple of it")
    row = gpu_kinds().get(match["kind"].lower())
    if row is None:
        target, name, memory = _read_description(match["kind"])
        return GpuTopology(match["kind"], hosts, gpus, target, name, memory)
    return GpuTopology(match["kind"].lower(), hosts, gpus, target_text(row), row["name"], row["device"]["device_memory_size"])


def _read_description(file: str) -> tuple[str, str, int]:
    """(text, name of the GPU, bytes of its memory) of a file with a GpuTargetConfigProto in text form.

    Raises:
      UserError: the file cannot be read, is incomplete, or describes another maker's GPU.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"topology names the description {file}, which cannot be read ({reason}); known kinds: "
                        f"{', '.join(gpu_kinds())}") from None
    uncommented = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    fields = {name: value.strip('"') for name, value in _FIELD.findall(uncommented)}
    needed = (*next(iter(gpu_kinds().values()))["device"], "major", "platform_name", "device_description_str")
    missing = [name for name in needed if name not in fields]
    if missing:
        raise UserError(f"the description {file} lacks {', '.join(missing)}; write a GpuTargetConfigProto with all of them, "
                        "like those in xla/backends/gpu/target_config/specs of OpenXLA")
    if fields["platform_name"] != "CUDA":
        raise UserError(f"the description {file} is for the platform {fields['platform_name']!r}; only CUDA is supported")
    if not fields["device_memory_size"].isdecimal():
        raise UserError(f"the description {file} has device_memory_size {fields['device_memory_size']!r}; bytes are expected")
    return text, fields["device_description_str"], int(fields["device_memory_size"])


def gpu_topology_devices(topology: GpuTopology) -> list[jax.Device]:
    """The devices of a topology, host by host. Programs compile for them, but cannot run on them.

    Raises:
      UserError: the compiler is not installed, is of another version than JAX, or rejects the description.
    """
    _check_compiler(topology.name)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    describe_memory(topology.device_kind, topology.usable)
    shape = f"1x{topology.hosts}x{topology.gpus}"
    try:
        return list(topologies.get_topology_desc(platform="cuda", target_config=topology.target, topology=shape).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise UserError(f"the GPU compiler rejects topology {topology.name}: {str(error).splitlines()[0]}") from error


def _check_compiler(name: str) -> None:
    """Raises UserError unless a CUDA plugin of JAX's own version, and cuDNN, are installed."""
    versions = {}
    for plugin in _PLUGINS:
        with_plugin = importlib.util.find_spec(plugin.replace("-", "_")) is not None
        versions |= {plugin: importlib.metadata.version(plugin)} if with_plugin else {}
    if not versions:
        raise UserError(f"the GPU compiler, which --compile needs for {name}, is not installed; run: {_INSTALL}")
    plugin, version = next(iter(versions.items()))
    jaxlib = importlib.metadata.version("jaxlib")
    if version != jaxlib:
        raise UserError(f"the GPU compiler, which --compile needs for {name}, is {plugin} {version}, but jaxlib is "
                        f"{jaxlib}, and both must have the same version; run: pip install -U "
                        f"'{plugin}=={jaxlib}'")
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cudnn") is None:
        raise UserError(f"the GPU compiler, which --compile needs for {name}, lacks cuDNN; run: {_INSTALL}")
