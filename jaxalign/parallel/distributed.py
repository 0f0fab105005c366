"""Starts and ends a run of several processes: finds the other processes from flags, the environment or the launcher.

JAX detects TPU pods, GKE, Kubernetes and Slurm. This module adds Open MPI 5, hosts where one process has several GPUs, and a
roll call before JAX starts: without it JAX ends the process with a stack trace if another one is missing.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxalign import interrupts
from jaxalign.commands import reserve_memory
from jaxalign.errors import UserError, print_error
from jaxalign.parallel import hosts
from jaxalign.parallel.relay import relayed
from jaxalign.parallel.roll_call import call
from jaxalign.parallel.simulated import enough_threads

FLAGS = ("coordinator", "processes", "process", "start_timeout")
USAGE = """\
  --coordinator=HOST:PORT, --processes=N, --process=I
                        for a run of several processes: address of process 0, number of processes, index of this one;
                        detected on TPU pods, GKE, Slurm and Open MPI (docs/hosts.md); --processes=1: a single process
  --start_timeout=S     seconds to wait for all processes; default 300
"""
_LONGEST_TIMEOUT = 1e7  # Seconds; the system refuses to wait for much longer.
_DIGITS = 9
_TIMEOUT = 300.0
_HOLD_SECONDS = 5.0  # Time for the threads of this process to report that process 0 was killed.
_ENVIRONMENT = {"coordinator": "JAX_COORDINATOR_ADDRESS", "processes": "JAX_NUM_PROCESSES", "process": "JAX_PROCESS_ID"}
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_FIRST_PORT, _PORTS = 61440, 4096  # Ephemeral ports, as in JAX's Slurm support.
_watch: hosts.Watch | None = None
_unrelated: BaseException | None = None  # An error that the end of another process has not caused.


class ProcessGroup(NamedTuple):
    """The known properties of a group of processes. devices: local accelerators of this process; None for all of the host's."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: float = _TIMEOUT
    devices: tuple[int, ...] | None = None


def take_flags(arguments: Sequence[str]) -> tuple[ProcessGroup, list[str]]:
    """Parses this module's flags. Returns the group and the remaining arguments.

    Raises:
        UserError: a value is invalid.
    """
    given, rest, waiting = {}, [], iter(arguments)
    for argument in waiting:
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in FLAGS:
            given[name] = value if equals else next(waiting, "")
        else:
            rest.append(argument)
    return _checked(given, {name: f"--{name}" for name in FLAGS}), rest


def _checked(given: Mapping[str, str], called: Mapping[str, str]) -> ProcessGroup:
    """Parses `given` as a group. called: the user-facing name of each value."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name == "coordinator":
            host, _, port = value.rpartition(":")
            if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
                raise UserError(f"{called[name]} is {value!r}; HOST:PORT is expected, the host of process 0 and a free port "
                                "on it, such as node-0:8476")
            fields[name] = value
        elif name == "start_timeout":
            if not re.fullmatch(r"\d+(\.\d*)?", value) or not 0 < float(value) <= _LONGEST_TIMEOUT:
                raise UserError(f"{called[name]} is {value!r}; a number of seconds above 0 is expected, at "
                                f"most {_LONGEST_TIMEOUT:.0f}")
            fields["timeout"] = float(value)
        else:
            if not value.isdecimal() or len(value) > _DIGITS or int(value) < (name == "processes"):
                least = "at least 1" if name == "processes" else "0 or above"
                raise UserError(f"{called[name]} is {value!r}; a whole number of {least} is expected")
            fields[name] = int(value)
    group = ProcessGroup(**fields)
    if group.process is not None and group.processes is not None:
        _check_range(group, called["process"], called["processes"])
    return group


def _check_range(group: ProcessGroup, process: str, processes: str) -> None:
    if group.process >= group.processes:
        raise UserError(f"{process} is {group.process}, but {processes} is {group.processes}: processes are numbered from 0 to "
                        f"{group.processes - 1}")


def find(given: ProcessGroup, environ: Mapping[str, str] | None = None) -> ProcessGroup | None:
    """Completes the group from JAX's environment variables, then from the launcher. None for a single process.

    Raises:
        UserError: a value is missing.
    """
    environ = os.environ if environ is None else environ
    if given.processes == 1:
        return None
    own = {name: environ[variable] for name, variable in _ENVIRONMENT.items() if variable in environ}
    known = _filled(given, _checked(own, _ENVIRONMENT))
    if known.processes == 1:
        return None
    missing = [name for name in _ENVIRONMENT if getattr(known, name) is None]
    launcher = ""
    if missing:
        launcher, provided = _launched(known, environ)
        if provided is not None:
            known = _filled(known, provided)
        if known.processes == 1 or known[:3] == (None, None, None):
            return None
        missing = [name for name in _ENVIRONMENT if getattr(known, name) is None]
    if missing:
        there = ", ".join(f"--{name}" for name in _ENVIRONMENT if name not in missing)
        absent = " and ".join(f"--{name}" for name in missing)
        problem = f"{launcher} provides {there}" if launcher else f"{there} is known"
        raise UserError(f"{problem}, but not {absent}: give --coordinator=HOST:PORT, --processes=N and --process=I to each "
                        "process, or none of them for a single-process run")
    _check_range(known, "--process", "--processes")
    return known


def _filled(group: ProcessGroup, other: ProcessGroup) -> ProcessGroup:
    names = ("coordinator", "processes", "process", "devices")
    return group._replace(**{name: getattr(other, name) for name in names if getattr(group, name) is None})


def _launched(known: ProcessGroup, environ: Mapping[str, str]) -> tuple[str, ProcessGroup | None]:
    """Returns (name of the launcher of this process, the group that it provides), or ("", None)."""
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "Open MPI", _open_mpi(known, environ)
    if all(name in environ for name in _SLURM):
        if environ["SLURM_NTASKS"] == "1":
            return "Slurm", ProcessGroup(processes=1)
        each = re.fullmatch(r"1(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        return "Slurm", _detected(known)._replace(devices=None if each else (int(environ["SLURM_LOCALID"]),))
    if "tpu" in environ.get("JAX_PLATFORMS", "tpu"):
        named = any(name in environ for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"))
        if named or glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
            return "the TPU", _detected(known)
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return "Kubernetes", _detected(known)
    return "", None


def _open_mpi(known: ProcessGroup, environ: Mapping[str, str]) -> ProcessGroup:
    """Up to Open MPI 4, JAX finds the first host. Version 5 only reports whether all processes are on this host."""
    size, rank, here, local = (
        int(environ.get(f"OMPI_COMM_WORLD_{name}", missing))
        for name, missing in (("SIZE", 1), ("RANK", 0), ("LOCAL_SIZE", 1), ("LOCAL_RANK", 0))
    )
    group = ProcessGroup(None, size, rank, devices=(local,) if here > 1 else None)
    if size == 1:
        return group
    if "OMPI_MCA_orte_hnp_uri" in environ:
        return group._replace(coordinator=_detected(known).coordinator)
    if size == here:
        job = environ.get("PMIX_NAMESPACE", str(os.getppid()))
        return group._replace(coordinator=f"localhost:{_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS}")
    return group


def _detected(known: ProcessGroup) -> ProcessGroup:
    """Returns the group that JAX detects. Raises UserError if JAX recognises the launcher but cannot read it."""
    from jax._src import clusters  # The only public interface to it is jax.distributed.initialize.

    try:
        detected = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, (), None, int(known.timeout))
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(f"the launcher of this process was recognised, but JAX cannot read it ({why}); "
                        "give --coordinator=HOST:PORT, --processes=N and --process=I, or --processes=1 for a single "
                        "process") from error
    return ProcessGroup(*detected[:3])


def start(given: ProcessGroup) -> None:
    """Joins the other processes of the run, if any. Call it before JAX computes anything.

    Raises:
        UserError: the group is incomplete, or another process does not arrive in time.
    """
    global _watch
    group = find(given)
    if group is None:
        return
    connections = call(group.coordinator, group.processes, group.process, group.timeout)
    import jax

    # Signals must interrupt, as in a run of one process.
    jax.config.update("jax_enable_preemption_service", False)
    devices = None if "JAX_LOCAL_DEVICE_IDS" in os.environ else group.devices
    address = group.coordinator
    if group.process != 0:
        address = relayed(group.coordinator, _HOLD_SECONDS + 2 * hosts.poll_seconds(group.processes))
    jax.distributed.initialize(
        address, group.processes, group.process, devices, cluster_detection_method="deactivate",
        initialization_timeout=int(max(group.timeout, 1)),
    )
    _watch = hosts.Watch(connections)
    if not hosts.is_first():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open to the end of the process)
        logging.getLogger("jaxalign").setLevel(logging.ERROR)


@contextlib.contextmanager
def running(given: ProcessGroup, explain: Callable[[BaseException], tuple[str, int] | None]) -> Iterator[None]:
    """Runs the body of a program after `start`. If one of several processes fails, it reports why, and all exit with its code.

    explain: returns the message and exit code of an error; None for an internal error, which exits with 1.
    """
    enough_threads()
    reserve_memory()
    start(given)
    if _watch is None:
        yield
        return
    try:
        with interrupts.before_end(_tell):
            yield
            hosts.wait()
    except BaseException as error:
        explained = explain(error)
        why, code = explained or (f"{type(error).__name__}: {error}", 1)
        if explained is None:
            end_with_others(error)
            traceback.print_exc()
        else:
            print_error(f"process {hosts.index()}: {why}", code)
        _tell(code, why)
        sys.stderr.flush()
        os._exit(code)  # JAX's shutdown would wait for the others, which have ended.
    _watch.stop()
    import jax

    jax.distributed.shutdown()


def end_with_others(error: BaseException) -> None:
    """Leaves the end of this process to the watch if another process has ended, which may be the cause of `error`.

    A collective fails on all processes if one of them was killed. Call this before the error is recorded or printed. If another
    process has ended, this does not return. Otherwise, it returns after the time in which the watch would have noticed, and a
    second call with the same error returns at once.
    """
    global _unrelated
    if _watch is None or error is _unrelated:
        return
    if _watch.ending.wait(2 * hosts.poll_seconds(hosts.count())):
        threading.Event().wait()
    _unrelated = error


def _tell(code: int, why: str) -> None:
    """Notifies the other processes that this one ends."""
    _watch.stop(code)
    hosts.announce_failure(code, why)
