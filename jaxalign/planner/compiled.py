"""Compiles a run's programs for devices that need not be attached. Reports memory, work and traffic, from the compiler.

    topology = parse_topology("v5e:4x4")
    sharding = Sharding(make_mesh(..., devices=topology_devices(topology)))
    policy = policy_model(config, sharding, shape="Llama-3.1-8B")
    found = compile_run(config, policy, usable=topology.usable)

Every figure is for one device. Nothing runs. Neither weights nor a tokenizer are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding

from jaxalign.config import Config
from jaxalign.models.model import Model
from jaxalign.planner import hlo_text
from jaxalign.planner.hlo import Collective, collectives
from jaxalign.planner.hlo_work import flops
from jaxalign.planner.programs import PlannedProgram, Run, device_bytes, run_tasks
from jaxalign.planner.surprises import surprises

REFUSAL_LINES = 40


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. `peak` is the maximum in use while the program runs: arguments, results that do not reuse an
    argument's memory (outputs - aliased), temporaries and the program's code."""

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One jitted step of a run as the compiler sees it.

    Attributes:
      stage, phase, role: such as "ppo", "update", "policy, critic". The phases are resharding, sampling, prefill, entering,
        widening, decode, reasoning, labelling, scoring, reward, checks and update.
      seconds: seconds to lower and compile the program.
      memory: None if the program does not fit and the compiler rejected it.
      refusal: the first lines of the compiler's error, or "".
      flops, bytes_accessed: per device, from the compiler's cost analysis, which counts the body of a loop once.
      products: FLOPs of the matrix products outside kernels; a product in a loop counts once per iteration. None if the
        compiled text is not available.
      collectives: the communication between devices; a collective in a loop counts once per iteration. None if the compiled
        text is not available.
      resident: bytes, by role, of arrays that are on the device while the program runs but are not its arguments.
      usable: bytes of device memory available to programs; None if unknown.
      warnings: sentences about unexpected costs (see `surprises`).
    """

    stage: str
    phase: str
    role: str
    seconds: float
    memory: Memory | None
    refusal: str
    flops: float
    bytes_accessed: float
    products: int | None
    collectives: tuple[Collective, ...] | None
    resident: dict[str, int]
    usable: int | None
    warnings: tuple[str, ...]

    @property
    def total(self) -> int | None:
        """Bytes in use at the program's peak, including resident arrays; None if the compiler rejected the program."""
        return None if self.memory is None else self.memory.peak + sum(self.resident.values())

    @property
    def fits(self) -> bool:
        """Whether the compiler accepted the program and it fits on the device together with the resident arrays."""
        return self.memory is not None and (self.usable is None or self.total <= self.usable)


def compile_run(
    config: Config,
    policy: Model,
    *,
    prompt: int | None = None,
    usable: int | None = None,
    programs: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[CompiledProgram]:
    """Compiles every jitted step of the run's stages, one after another (minutes for large models).

    Args:
      config: the checked config; its stages determine the programs.
      policy: the run's model (`shapes.policy_model`), with a Sharding on topology devices or on real ones.
      prompt: tokens of the longest prompt; by default model.max_length minus the stage's max_new_tokens.
      usable: bytes of one device's memory (`Topology.usable`).
      programs: compile only the programs with one of these strings in their name; empty compiles all.
      progress: called with the name of each program before it is compiled, such as "ppo update (policy)".
    """
    results = []
    for program in run_programs(config, policy, prompt):
        if programs and not any(wanted in program.name for wanted in programs):
            continue
        if progress is not None:
            progress(program.name)
        results.append(compile_program(program, usable))
    return results


def run_programs(config: Config, policy: Model, prompt: int | None = None) -> list[PlannedProgram]:
    """Every jitted step of the run's stages, in the order of the stages."""
    tasks = run_tasks(Run(config, policy, prompt))
    return [program for task in tasks if task.calls != 0 for program in task.programs()]


def compile_program(program: PlannedProgram, usable: int | None = None) -> CompiledProgram:
    """Lowers and compiles one program. Returns a result even if the program does not fit; raises any other compiler error."""
    began = time.perf_counter()
    named = {"stage": program.stage, "phase": program.phase, "role": program.role, "usable": usable}
    try:
        leaves, structure = jax.tree.flatten(program.arguments)
        compiled, text = _compile(program.step, structure, tuple(leaves))  # In a hashable form, for the cache.
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        held = {role: device_bytes(tree) for role, tree in program.held.items()}
        words = "\n".join(str(error).splitlines()[:REFUSAL_LINES])
        return CompiledProgram(
            **named, seconds=time.perf_counter() - began, memory=None, refusal=words, flops=0.0, bytes_accessed=0.0,
            products=None, collectives=(), resident=held, warnings=(),
        )
    seconds = time.perf_counter() - began
    kept = _kept(compiled, program.arguments, program.step)
    arrays = [*kept, *_results(compiled)]
    mesh = next((x.sharding.mesh for _, x in kept if isinstance(x.sharding, NamedSharding)), None)
    module = None if text is None else hlo_text.parse(text)
    traffic, unread = (), ()
    if module is None:
        traffic, unread = None, ("its collectives are unknown: neither the compiler nor JAX provides the compiled text",)
    elif mesh is not None and mesh.size > 1:
        traffic = collectives(module, dict(mesh.shape), program.turns)
    counted, cost = compiled.memory_analysis(), compiled.cost_analysis()
    memory = Memory(
        counted.argument_size_in_bytes, counted.output_size_in_bytes, counted.alias_size_in_bytes,
        counted.temp_size_in_bytes, counted.generated_code_size_in_bytes,
    )
    own = {id(leaf) for _, leaf in kept}
    beside = {
        role: device_bytes([leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in own])
        for role, tree in program.held.items()
    }
    warnings = surprises(program.phase, traffic or (), ((name, x.shape, x.dtype, x.sharding) for name, x in arrays))
    return CompiledProgram(
        **named, seconds=seconds, memory=memory, refusal="", flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0), collectives=traffic,
        products=None if module is None else flops(module, program.turns),
        resident={role: size for role, size in beside.items() if size}, warnings=unread + warnings,
    )


@functools.lru_cache(maxsize=16)  # Stages that sample share the sampling programs.
def _compile(step: Callable, structure, leaves: tuple) -> tuple[jax.stages.Compiled, str | None]:
    """(the compiled program, its text or None).

    Prefers the text that XLA dumps: JAX cannot print every instruction of a TPU compiler newer than itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with _names_in_cache_key():
            compiled = step.lower(*jax.tree.unflatten(structure, leaves)).compile(compiler_options=options)
        written = sorted(pathlib.Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        if written:
            return compiled, written[-1].read_text(encoding="utf-8")
    try:
        return compiled, compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return compiled, None


@contextlib.contextmanager
def _names_in_cache_key():
    """Prevents the persistent compile cache from returning a program with argument names of an older version of the code."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def _kept(compiled, arguments: tuple, step: Callable) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """(path, array) of the arguments that the compiled program reads; JAX drops unused arguments."""
    paths = []
    for name, argument in zip(inspect.signature(step).parameters, arguments, strict=False):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                paths.append(((name + jax.tree_util.keystr(path)).removeprefix("arguments."), leaf))
    used = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    return [entry for entry, sharding in zip(paths, used, strict=True) if sharding is not None]


def _results(compiled) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """(path, array) of each result, with the sharding that the compiler chose."""
    shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    infos = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    return [
        ("result" + jax.tree_util.keystr(path), jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
        for (path, info), sharding in zip(infos, shardings, strict=True)
    ]
