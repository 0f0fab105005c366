"""The runs whose compiled programs are compared with a record, and the facts that are compared.

    python -m tests.goldens.record            # compiles for every topology, prints what changed, and writes the record
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxalign.config import Config, from_config_dict
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner import hlo_text, shapes
from jaxalign.planner.compiled import CompiledProgram, compile_run, run_programs
from jaxalign.planner.compiler import array_arguments, compile_lowered, lower, names_in_cache_key
from jaxalign.planner.programs import PlannedProgram, device_bytes
from jaxalign.planner.stored_arrays import float32_copies, whole_logits
from jaxalign.planner.topology import Topology, parse_topology, topology_devices
from jaxalign.train import read_values

RECORD = pathlib.Path(__file__).with_name("compiled_goldens.json")
SHAPE = "Qwen3-0.6B"
PROMPT = 512
ROW = 768  # model.max_length of the config
MESHES = {"h100:1x8": (1, 8, 1), "h100:8x8": (1, 64, 1), "v5e:4x4": (1, 4, 4), "v5p:4x4x4": (1, 8, 8)}
"""(data, fsdp, tensor) by topology."""


class Golden(NamedTuple):
    """The stages of a run, whether it trains adapters on a bfloat16 base or all weights, and its recorded programs."""

    stages: str
    adapters: bool
    programs: tuple[str, ...]


RUNS = {
    "ppo": Golden("preference,ppo", True, ("ppo scoring", "ppo update", "ppo sampling")),
    "dpo": Golden("dpo", True, ("dpo update",)),
    "supervised": Golden("sft,preference", False, ("sft update", "preference update")),
}
WITH_ATTENTION = ("update", "scoring")
"""The phases that read whole rows of tokens. Sampling attends from one token at a time, without a kernel."""
FUSED = {"gpu": "cuDNN attention", "tpu": "splash attention"}
PACKAGES = {"gpu": ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cudnn-cu12"), "tpu": ("jax", "jaxlib", "libtpu")}
_LARGE = 1 << 20
_TOLERANCE = 0.05


def platform(topology: str) -> str:
    return "gpu" if topology.startswith("h100") else "tpu"


def missing(topology: str) -> str:
    """The compiler that a topology needs and that is not installed, or ""."""
    modules = {"gpu": ("jax_cuda12_plugin", "the GPU compiler"), "tpu": ("libtpu", "the TPU compiler")}
    module, name = modules[platform(topology)]
    return "" if importlib.util.find_spec(module) else f"{name} is not installed"


def versions(topology: str) -> dict[str, str]:
    """The versions of the packages that determine what the compiler does."""
    return {package: importlib.metadata.version(package) for package in PACKAGES[platform(topology)]}


def run_config(name: str, topology: str, *flags: str) -> Config:
    """The config of a run of `RUNS`. flags: further flags as on the command line."""
    run, mesh = RUNS[name], dict(zip(("data", "fsdp", "tensor"), MESHES[topology], strict=True))
    rows = max(16, mesh["data"] * mesh["fsdp"])
    given = [f"stages={run.stages}", *(f"mesh.{axis}={size}" for axis, size in mesh.items()), "model.path=nowhere",
             "data.train=nowhere", f"ppo.batch={2 * max(32, rows)}", f"sft.batch_rows={rows}",
             f"preference.batch={rows}", f"dpo.batch={rows}",
             # Several micro-batches for every topology.
             "ppo.micro_batch_tokens=3072", "preference.micro_batch_tokens=1536"]
    given += [] if run.adapters else ["lora.rank=0", "lora.base=float32"]
    source = "--config=configs/real_size.py:llama31_8b_v5e16"
    values, _, _ = read_values(["plan", source, *(f"--config.{flag}" for flag in (*given, *flags))])
    return from_config_dict(values)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is compared with the record, of one program on one device.

    Attributes:
      peak: bytes, without the arrays that are not arguments.
      sent: bytes sent, by kind of collective and mesh axes, such as "all-gather fsdp".
      attention: calls of the fused attention kernel.
      overlapped: the share of the bytes of gathers during which a product or attention runs.
      unaliased: bytes of donated arguments whose memory no result reuses.
      copies: bytes, by argument, of bfloat16 weights that are stored in float32.
      logits: types of arrays with the logits of every token.
    """

    peak: int
    sent: Mapping[str, float]
    attention: int
    overlapped: float
    unaliased: int
    copies: Mapping[str, int]
    logits: tuple[str, ...]

    def recorded(self) -> dict[str, Any]:
        """The part of the facts that is written to the record; the rest must be empty or 0."""
        sent = {name: round(size) for name, size in sorted(self.sent.items()) if size >= _LARGE}
        return {"peak": self.peak, "sent": sent, "attention": self.attention, "overlapped": round(self.overlapped, 2)}


def compiled_facts(
    name: str, topology: str, *flags: str, reports: pathlib.Path, programs: Iterable[str] | None = None, shape: str = SHAPE
) -> dict[str, Facts]:
    """The facts of the programs of a run, by name, such as "ppo update".

    programs: a selection of the programs; None: all that `RUNS` names.
    reports: the folder that keeps the compiler's reports.
    shape: the published shape of the model.
    """
    config, devices = run_config(name, topology, *flags), parse_topology(topology)
    policy = shapes.policy_model(config, make_sharding(config.mesh, topology_devices(devices)), shape)
    wanted = RUNS[name].programs if programs is None else tuple(programs)
    with names_in_cache_key():
        compiled = compile_run(config, policy, prompt=PROMPT, usable=devices.usable, programs=wanted, reports=reports,
                               topology=topology)
        planned = [one for one in run_programs(config, policy, PROMPT) if any(name in one.name for name in wanted)]
        return {f"{one.stage} {one.phase}": _facts(policy, devices, one, result, reports)
                for one, result in zip(planned, compiled, strict=True)}


def _facts(policy: Model, topology: Topology, program: PlannedProgram, result: CompiledProgram,
           reports: pathlib.Path) -> Facts:
    lowered = lower(program.step, program.arguments)
    module = hlo_text.parse(compile_lowered(lowered, reports, topology.name).text)
    sent: dict[str, float] = {}
    for one in result.collectives:
        name = f"{one.kind} {'+'.join(one.axes) or 'no axis'}"
        sent[name] = sent.get(name, 0.0) + one.total
    gathers = [one for one in result.collectives if one.kind == "all-gather"]
    overlapped = sum(one.total for one in gathers if one.overlapped) / max(1.0, sum(one.total for one in gathers))
    arrays = [array for _, array in array_arguments(program.step, program.arguments)]
    given = jax.tree.leaves(lowered.step.args_info)
    donated = device_bytes([array for array, info in zip(arrays, given, strict=True) if info.donated])
    decoder = policy.config
    vocabulary = decoder.vocab // policy.sharding.mesh.shape["tensor"]
    return Facts(
        result.memory.peak, sent, result.kernels.get(FUSED[platform(topology.name)], 0), overlapped,
        donated - result.memory.aliased, float32_copies(module), tuple(whole_logits(module, vocabulary, ROW, decoder.embed)),
    )


def faults(program: str, topology: str, facts: Facts, record: Mapping[str, Any]) -> list[str]:
    """What is wrong with a program, one sentence each.

    record: `Facts.recorded` of the same program; empty if the compilers' versions differ from the recorded ones, so that only
    the properties that do not depend on a record are checked.
    """
    found = []
    if program.split()[1] in WITH_ATTENTION and not facts.attention:
        found.append(f"{program} does not call {FUSED[platform(topology)]}")
    found += [f"{program} stores {name}, which is bfloat16, in float32: {size / 1e6:.1f} MB"
              for name, size in facts.copies.items()]
    found += [f"{program} stores the logits of every token: {kind}" for kind in facts.logits]
    if facts.unaliased > 0.01 * facts.peak:
        found.append(f"{program} does not reuse the memory of {facts.unaliased / 1e6:.1f} MB of donated arguments")
    if not record:
        return found
    if not _near(facts.peak, record["peak"]):
        found.append(f"{program} needs {facts.peak / 1e6:.1f} MB; the record is {record['peak'] / 1e6:.1f} MB")
    for name in sorted(record["sent"].keys() | facts.recorded()["sent"].keys()):
        sent, before = facts.sent.get(name, 0.0), record["sent"].get(name, 0)
        if not _near(sent, before):
            found.append(f"{program} sends {sent / 1e6:.1f} MB by {name}; the record is {before / 1e6:.1f} MB")
    if facts.attention != record["attention"]:
        kernel = FUSED[platform(topology)]
        found.append(f"{program} calls {kernel} {facts.attention} times; the record is {record['attention']}")
    if facts.overlapped < record.get("overlapped", 0.0) - _TOLERANCE:
        found.append(f"{program} gathers {facts.overlapped:.0%} of the bytes during computation; the record is "
                     f"{record['overlapped']:.0%}")
    return found


def _near(value: float, recorded: float) -> bool:
    return abs(value - recorded) <= max(_TOLERANCE * recorded, _LARGE)


def read_record() -> dict[str, Any]:
    """{"versions": {platform: ...}, "programs": {topology: {program: ...}}}"""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"versions": {}, "programs": {}}
