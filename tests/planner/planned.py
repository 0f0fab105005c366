"""Models and clusters shared by the tests of the planner."""

from __future__ import annotations

import dataclasses

from jaxalign.config import Config, from_config_dict
from jaxalign.config import Mesh as MeshConfig
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.model import Model
from jaxalign.planner import shapes
from jaxalign.planner.compiled import CompiledProgram, CompileTarget, compile_targets
from jaxalign.planner.estimate import abstract_sharding
from jaxalign.planner.hardware import Cluster, tpu_cluster
from jaxalign.planner.programs import PlannedProgram
from jaxalign.planner.search import Given
from jaxalign.planner.topology import parse_topology
from jaxalign.train import read_values

FSDP16 = ("--config.mesh.fsdp=16", "--config.mesh.tensor=1", "--config.sft.batch_rows=16",
          "--config.preference.micro_batch_tokens=1536")


def config(*flags: str, file: str = "configs/real_size.py:llama31_8b_v5e16") -> Config:
    """A config for models of real size without files; by default the 8B model on fsdp 16."""
    own = FSDP16 if file.endswith("v5e16") else ()
    values, _, _ = read_values(["plan", f"--config={file}", *own, *flags])
    if values.model.source == "huggingface":
        values.model.path = "nowhere"
    if values.data.source != "world":
        values.data.train = "nowhere"
    return from_config_dict(values)


def model(shape: str = "Llama-3.1-8B", head: str = "lm", rank: int = 0, **mesh) -> Model:
    """A published model in bfloat16 on an abstract mesh."""
    sharding = abstract_sharding(MeshConfig(**mesh))
    made = shapes.policy_model(config("--config.lora.rank=0", "--config.lora.base=float32"), sharding, shape)
    adapters = LoraAdapters(rank, 32.0, ("*",)) if rank else None
    return dataclasses.replace(made, head=head, lora=adapters)


def cluster(topology: str, slices: int = 1) -> Cluster:
    return tpu_cluster(parse_topology(topology, slices))


def given(topology: str, *flags: str, shape: str = "Llama-3.1-8B", **changes) -> Given:
    """A plan of the 8B config on a TPU slice, with flags as on the command line."""
    chosen = config(*flags)
    return Given(chosen, shapes.policy_model(chosen, abstract_sharding(chosen.mesh), shape), cluster(topology), **changes)


def compile_program(program: PlannedProgram, usable: int | None = None) -> CompiledProgram:
    """The figures of one program, which may not fit."""
    return compile_targets([CompileTarget(program, usable)])[0]
