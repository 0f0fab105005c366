"""Run one program in several real processes on this machine, which share eight CPU devices."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEVICES = 8
# Most test programs run once or twice. These options cut the CPU time of their compilation to a third. The fusion emitters are
# the largest part: they build each fusion with MLIR. Metadata for LLVM's optimisations is not needed without optimisations.
COMPILE_FAST = " ".join([
    "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_enable_alias_scope_metadata=false", "--xla_llvm_enable_noalias_metadata=false",
    "--xla_llvm_enable_invariant_load_metadata=false",
])
_XLA = f"{COMPILE_FAST} --xla_cpu_collective_call_terminate_timeout_seconds=600"


class Ended(NamedTuple):
    """The result of one process: exit code, output, and the seconds until all processes had ended."""

    code: int
    out: str
    err: str
    seconds: float


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def flags(count: int, number: int, port: int) -> list[str]:
    """The flags of one process; none if there is only one."""
    if count == 1:
        return []
    return [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={number}"]


@contextlib.contextmanager
def started(
    count: int, command: Sequence[str], each: Sequence[Sequence[str]] | None = None
) -> Iterator[list[subprocess.Popen]]:
    """Run `python COMMAND...` in `count` processes, each with its process flags and its own further arguments `each[i]`."""
    port, running = free_port(), []
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count} {_XLA}",
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    try:
        for number in range(count):
            own = each[number] if each else ()
            running.append(subprocess.Popen(
                [sys.executable, *command, *flags(count, number, port), *own], env=environment, cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ))
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def ends(running: Sequence[subprocess.Popen], timeout: float = 400.0) -> list[Ended]:
    """Wait for all processes."""
    began = time.monotonic()
    said = [process.communicate(timeout=timeout) for process in running]
    seconds = time.monotonic() - began
    return [Ended(process.returncode, out, err, seconds) for process, (out, err) in zip(running, said, strict=True)]


def run(count: int, command: Sequence[str], each: Sequence[Sequence[str]] | None = None) -> list[Ended]:
    with started(count, command, each) as running:
        return ends(running)


def run_well(count: int, command: Sequence[str]) -> list[Ended]:
    """Like `run`, but every process must exit with code 0."""
    found = run(count, command)
    assert [one.code for one in found] == [0] * count, "\n".join(one.err[-3000:] for one in found)
    return found
