"""Lowers and compiles one program for devices that need not be attached, and keeps the compiler's report in a folder.

JAX cannot read back a compiled program for absent devices, so the folder has reports instead: the memory and the text of each
compiled program, by a hash of everything that the compiler reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator

import jax
from jax.sharding import NamedSharding

from jaxalign.planner.gpu_topology import OPTIONS
from jaxalign.storage import write_bytes_atomically

REFUSAL_LINES = 40
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt",
             "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MOST_REPORTS = 2000
_FORMAT = 5
"""Part of the key of a kept report. Increase it if the report changes, or a step's own options
(`rollout.ring.decoding_options`)."""
_POINTER = re.compile(r'(@CustomSPMDPartitioning\([^\n]*?backend_config = )"\d+"')


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
class Report:
    """The compiler's report of one program.

    Attributes:
      memory: None if the program does not fit and the compiler rejected it.
      refusal: the first lines of the compiler's error, or "".
      flops, bytes_accessed: from the compiler's cost analysis; None if the compiler has none, as those of GPUs.
      text: the compiled program as text; None if neither the compiler nor JAX provides it.
      kept: for each array of the arguments, whether the program reads it; JAX drops unused arguments.
      replicated: (path, shape, bytes of an element) of the results that every device holds as a whole, on a mesh of several
        devices.
    """

    memory: Memory | None
    refusal: str = ""
    flops: float | None = None
    bytes_accessed: float | None = None
    text: str | None = None
    kept: tuple[bool, ...] = ()
    replicated: tuple[tuple[str, tuple[int, ...], int], ...] = ()

    def to_bytes(self) -> bytes:
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def from_bytes(cls, content: bytes) -> Report:
        """Raises ValueError, TypeError, KeyError or zlib.error if the content is damaged."""
        values = json.loads(zlib.decompress(content))
        memory = values.pop("memory")
        replicated = tuple((path, tuple(shape), size) for path, shape, size in values.pop("replicated"))
        kept = tuple(values.pop("kept"))
        return cls(None if memory is None else Memory(**memory), kept=kept, replicated=replicated, **values)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A lowered program. key: a hash of its text, the names of its arguments, the devices, the compiler and its flags."""

    step: jax.stages.Lowered
    gpu: bool
    key: str


@functools.lru_cache(maxsize=16)  # Stages that sample share the sampling programs.
def _lower(step: Callable, structure, leaves: tuple) -> Lowered:
    arguments = jax.tree.unflatten(structure, leaves)
    traced = step.trace(*arguments)
    lowered = traced.lower()
    named = array_arguments(step, arguments)
    device = next((min(leaf.sharding.device_set, key=lambda one: one.id) for _, leaf in named), None)
    gpu = device is not None and device.platform == "gpu"
    kind = [] if device is None else [device.device_kind, device.client.platform_version]
    content = [_FORMAT, _content(traced, lowered), [path for path, _ in named], kind, _compiler(), OPTIONS if gpu else {}]
    return Lowered(lowered, gpu, hashlib.sha256(json.dumps(content).encode()).hexdigest())


def _content(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> str:
    """The text of a program, equal in every process.

    A function with its own partitioning rule, as cuDNN attention, is in the text only as the address of a Python object. The
    jaxpr has its parameters.
    """
    text = lowered.as_text()
    if "@CustomSPMDPartitioning" not in text:
        return text
    return _POINTER.sub(r"\1", text) + re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))


def lower(step: Callable, arguments: tuple) -> Lowered:
    """Lowers a jitted step for the devices of its arguments' shardings."""
    leaves, structure = jax.tree.flatten(arguments)
    return _lower(step, structure, tuple(leaves))  # In a hashable form, for the cache.


@functools.cache
def _compiler() -> list[str]:
    """The versions and the flags that determine what the compiler does."""
    versions = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return versions + [os.environ.get(name, "") for name in _FLAGS]


def array_arguments(step: Callable, arguments: tuple) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """(path, array) of each array in the arguments of a step."""
    paths = []
    for name, argument in zip(inspect.signature(step).parameters, arguments, strict=False):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                paths.append(((name + jax.tree_util.keystr(path)).removeprefix("arguments."), leaf))
    return paths


def compile_lowered(lowered: Lowered, folder: pathlib.Path | None = None, topology: str = "") -> Report:
    """The compiler's report, from the folder if it has one. Raises compiler errors except that the program does not fit.

    Args:
      lowered: the program.
      folder: the folder of reports; None: none is read or written.
      topology: the description of the devices, such as "v5e:4x4".
    """
    if folder is None:
        return _compile(lowered)
    file = folder / f"{hashlib.sha256((lowered.key + topology).encode()).hexdigest()}-report"
    try:
        report = Report.from_bytes(file.read_bytes())
        os.utime(file)
        return report
    except (OSError, ValueError, TypeError, KeyError, zlib.error):
        report = _compile(lowered)
    with contextlib.suppress(OSError):  # A folder that cannot be written only costs time.
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(file, report.to_bytes())
    return report


def remove_old_reports(folder: pathlib.Path) -> None:
    """Removes the reports that were not used for the longest time, except the last `_MOST_REPORTS`."""
    with contextlib.suppress(OSError):
        reports = sorted(folder.glob("*-report"), key=lambda file: file.stat().st_mtime)
        for file in reports[:-_MOST_REPORTS]:
            file.unlink(missing_ok=True)


def _compile(lowered: Lowered) -> Report:
    try:
        compiled, text = _compiled(lowered)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return Report(None, "\n".join(str(error).splitlines()[:REFUSAL_LINES]))
    cost, (memory, kept) = compiled.cost_analysis() or {}, memory_of(compiled)
    return Report(memory, "", cost.get("flops"), cost.get("bytes accessed"), text, kept, tuple(_replicated(compiled)))


def memory_of(compiled: jax.stages.Compiled) -> tuple[Memory, tuple[bool, ...]]:
    """(the memory of a program, `Report.kept`)."""
    counted = compiled.memory_analysis()
    memory = Memory(
        counted.argument_size_in_bytes, counted.output_size_in_bytes, counted.alias_size_in_bytes,
        counted.temp_size_in_bytes, counted.generated_code_size_in_bytes,
    )
    used = compiled.in_tree.flatten_up_to(compiled.input_shardings)
    return memory, tuple(sharding is not None for sharding in used)


def _compiled(lowered: Lowered) -> tuple[jax.stages.Compiled, str | None]:
    """(the compiled program, its text or None).

    For TPUs, prefers the text that XLA dumps: JAX cannot print every instruction of a TPU compiler newer than itself.
    """
    if lowered.gpu:
        compiled = lowered.step.compile(compiler_options=OPTIONS)
        return compiled, compiled.as_text()
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.step.compile(compiler_options=options)
        written = sorted(pathlib.Path(folder).glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
        if written:
            return compiled, written[-1].read_text(encoding="utf-8")
    try:
        return compiled, compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return compiled, None


@contextlib.contextmanager
def names_in_cache_key() -> Iterator[None]:
    """Prevents the persistent compile cache from returning a program with argument names of an older version of the code."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def _replicated(compiled: jax.stages.Compiled) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(path, shape, bytes of an element) of each result that the compiler replicates on a mesh of several devices."""
    shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    infos = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    for (path, info), sharding in zip(infos, shardings, strict=True):
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.is_fully_replicated:
            yield "result" + jax.tree_util.keystr(path), info.shape, info.dtype.itemsize

