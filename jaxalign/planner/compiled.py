"""Compiles a run's programs for devices that need not be attached. Reports memory, work and traffic, from the compiler.

    topology = parse_topology("v5e:4x4")
    sharding = Sharding(make_mesh(..., devices=topology_devices(topology)))
    policy = policy_model(config, sharding, shape="Llama-3.1-8B")
    found = compile_run(config, policy, usable=topology.usable)

Every figure is for one device. Nothing runs. Neither weights nor a tokenizer are read.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.config import Config
from jaxalign.models.model import Model
from jaxalign.planner import hlo_text
from jaxalign.planner.compiler import (
    Lowered,
    Memory,
    Report,
    array_arguments,
    compile_lowered,
    lower,
    memory_of,
    names_in_cache_key,
    remove_old_reports,
)
from jaxalign.planner.hlo import Collective, collectives
from jaxalign.planner.hlo_work import flops
from jaxalign.planner.kernels import kernels
from jaxalign.planner.programs import PlannedProgram, Run, device_bytes, run_tasks
from jaxalign.planner.stored_arrays import copied_in_loops, float32_copies
from jaxalign.planner.surprises import surprises

_WORKER_BYTES = 4 << 30
"""Host memory that compiling one program may take."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One jitted step of a run as the compiler sees it.

    Attributes:
      stage, phase, role: such as "ppo", "update", "policy, critic". The phases are resharding, sampling, prefill, entering,
        widening, decode, reasoning, labelling, scoring, reward, checks and update.
      seconds: seconds to lower and compile the program, or to read its report.
      memory: None if the program does not fit and the compiler rejected it.
      refusal: the first lines of the compiler's error, or "".
      flops, bytes_accessed: per device, from the compiler's cost analysis, which counts the body of a loop once. None if the
        compiler has none, as for GPUs.
      products: FLOPs of the matrix products outside kernels; a product in a loop counts once per iteration. None if the
        compiled text is not available.
      collectives: the communication between devices; a collective in a loop counts once per iteration. None if the compiled
        text is not available.
      kernels: executions by kernel (`kernels.kernels`); None if the compiled text is not available.
      resident: bytes, by role, of arrays that are on the device while the program runs but are not its arguments.
      usable: bytes of device memory available to programs; None if unknown.
      warnings: sentences about unexpected costs (see `surprises`).
      devices: the devices of a role with a placement, as in "4-7 of v5e:2x4"; empty for config.mesh.
    """

    stage: str
    phase: str
    role: str
    seconds: float
    memory: Memory | None
    refusal: str
    flops: float | None
    bytes_accessed: float | None
    products: int | None
    collectives: tuple[Collective, ...] | None
    kernels: dict[str, int] | None
    resident: dict[str, int]
    usable: int | None
    warnings: tuple[str, ...]
    devices: str = ""

    @property
    def name(self) -> str:
        """Such as "ppo update", with the role and its devices if they have a placement."""
        return f"{self.stage} {self.phase}" + (f" ({self.role}) on {self.devices}" if self.devices else "")

    @property
    def total(self) -> int | None:
        """Bytes in use at the program's peak, including resident arrays; None if the compiler rejected the program."""
        return None if self.memory is None else self.memory.peak + sum(self.resident.values())

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted the program and it fits on the device together with the resident arrays."""
        return self.memory is not None and (self.usable is None or self.total <= self.usable)


class CompileTarget(NamedTuple):
    """A program, with the devices that it compiles for.

    Attributes:
      program: the program; its arguments have the devices.
      usable: bytes of one device's memory; None if unknown.
      topology: a description of the devices, for kept reports.
      devices: `CompiledProgram.devices`.
    """

    program: PlannedProgram
    usable: int | None = None
    topology: str = ""
    devices: str = ""


def compile_run(
    config: Config,
    policy: Model,
    *,
    prompt: int | None = None,
    usable: int | None = None,
    programs: Sequence[str] = (),
    progress: Callable[[CompiledProgram], None] | None = None,
    reports: pathlib.Path | None = None,
    topology: str = "",
) -> list[CompiledProgram]:
    """Compiles every jitted step of the run's stages, as many at the same time as cores and memory allow.

    Args:
      config: the checked config; its stages determine the programs.
      policy: the run's model (`shapes.policy_model`), with a Sharding on topology devices or on real ones.
      prompt: tokens of the longest prompt; by default model.max_length minus the stage's max_new_tokens.
      usable: bytes of one device's memory (`Topology.usable`).
      programs: compile only the programs with one of these strings in their name; empty compiles all.
      progress: called with each program when it is compiled, in any order and from other threads.
      reports: a folder that keeps the compiler's reports, so that the same program is compiled once; None: none is kept.
      topology: a description of the devices, for `reports`.
    """
    targets = [CompileTarget(program, usable, topology) for program in run_programs(config, policy, prompt)
               if not programs or any(wanted in program.name for wanted in programs)]
    return compile_targets(targets, progress, reports)


def compile_targets(
    targets: Sequence[CompileTarget], progress: Callable[[CompiledProgram], None] | None = None,
    reports: pathlib.Path | None = None,
) -> list[CompiledProgram]:
    """Compiles programs, as many at the same time as cores and memory allow. progress, reports: as in `compile_run`."""
    once: dict[tuple[str, str], concurrent.futures.Future[tuple[Report, float]]] = {}

    def compile_timed(lowered: Lowered, topology: str) -> tuple[Report, float]:
        began = time.perf_counter()
        return compile_lowered(lowered, reports, topology), time.perf_counter() - began

    def finish(target: CompileTarget, lowering: float, compiling: concurrent.futures.Future) -> CompiledProgram:
        report, seconds = compiling.result()
        compiled = _analysed(target.program, target.usable, report, lowering + seconds)
        compiled = dataclasses.replace(compiled, devices=target.devices)
        if progress is not None:
            progress(compiled)
        return compiled

    # One compilation per core, as far as the free memory of the machine allows.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(cores, psutil.virtual_memory().available // _WORKER_BYTES))
    # A thread that finishes a program waits for its report, which may be that of another program.
    with (
        names_in_cache_key(),
        concurrent.futures.ThreadPoolExecutor(workers) as compilers,
        concurrent.futures.ThreadPoolExecutor(max(1, len(targets))) as finishers,
    ):
        try:
            results = []
            for target in targets:
                began = time.perf_counter()
                lowered = lower(target.program.step, target.program.arguments)
                lowering, key = time.perf_counter() - began, (lowered.key, target.topology)
                if key not in once:
                    once[key] = compilers.submit(compile_timed, lowered, target.topology)
                results.append(finishers.submit(finish, target, lowering, once[key]))
            compiled = [result.result() for result in results]
        except BaseException:
            compilers.shutdown(wait=False, cancel_futures=True)
            raise
    if reports is not None:
        remove_old_reports(reports)
    return compiled


def run_programs(config: Config, policy: Model, prompt: int | None = None) -> list[PlannedProgram]:
    """Every jitted step of the run's stages, in the order of the stages."""
    tasks = run_tasks(Run(config, policy, prompt))
    return [program for task in tasks if task.calls != 0 for program in task.programs()]


def attached_peak(program: PlannedProgram) -> int | None:
    """Bytes in use at the peak of a program on one of the attached devices, with resident arrays, for which it is compiled as a
    run compiles it; None if the compiler rejects it for its memory. Raises any other compiler error."""
    try:
        memory, kept = memory_of(program.step.lower(*program.arguments).compile())
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return None
    return memory.peak + sum(_resident(program, kept).values())


def _resident(program: PlannedProgram, kept: Sequence[bool]) -> dict[str, int]:
    """Bytes, by role, of arrays that are on the device while a program runs but are not its arguments. kept: `Report.kept`."""
    arrays = array_arguments(program.step, program.arguments)
    own = {id(leaf) for (_, leaf), used in zip(arrays, kept, strict=True) if used}
    beside = {
        role: device_bytes([leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in own])
        for role, tree in program.held.items()
    }
    return {role: size for role, size in beside.items() if size}


def _analysed(program: PlannedProgram, usable: int | None, report: Report, seconds: float) -> CompiledProgram:
    """The figures of a program, from the compiler's report."""
    named = {"stage": program.stage, "phase": program.phase, "role": program.role, "usable": usable, "seconds": seconds}
    named |= {name: getattr(report, name) for name in ("memory", "refusal", "flops", "bytes_accessed")}
    if report.memory is None:
        held = {role: device_bytes(tree) for role, tree in program.held.items()}
        return CompiledProgram(**named, products=None, collectives=(), kernels={}, resident=held, warnings=())
    arrays = array_arguments(program.step, program.arguments)
    kept = [entry for entry, used in zip(arrays, report.kept, strict=True) if used]
    mesh = next((x.sharding.mesh for _, x in kept if isinstance(x.sharding, NamedSharding)), None)
    module = None if report.text is None else hlo_text.parse(report.text)
    traffic, unread = (), ()
    if module is None:
        traffic, unread = None, ("its collectives are unknown: neither the compiler nor JAX provides the compiled text",)
    elif mesh is not None and mesh.size > 1:
        gpu = mesh.devices.flat[0].platform == "gpu"
        traffic = collectives(module, dict(mesh.shape), program.turns, gpu)
    copied = {} if module is None else copied_in_loops(module)
    if copied and 2 * sum(copied.values()) < report.memory.arguments:  # Small copies are not worth a warning.
        copied = {}
    shown = [(name, x.shape, x.dtype, x.sharding) for name, x in kept]
    if mesh is not None:
        whole = NamedSharding(mesh, PartitionSpec())
        shown += [(name, shape, np.dtype((np.void, size)), whole) for name, shape, size in report.replicated]
    return CompiledProgram(
        **named, collectives=traffic, products=None if module is None else flops(module, program.turns),
        kernels=None if module is None else kernels(module, program.turns),
        resident=_resident(program, report.kept),
        warnings=unread + surprises(
            program.phase, traffic or (), shown, {} if module is None else float32_copies(module), copied,
        ),
    )
