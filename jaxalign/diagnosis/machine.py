"""Examines the machine: versions, devices, huge pages, the compile cache, and the disk.

The functions only read, except that `compile_cache` creates the cache's folder, as a run does.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxalign import __version__
from jaxalign.diagnosis.findings import Finding
from jaxalign.parallel.compile_cache import cache_folder, cache_limit, use_compile_cache

GIB = 2**30
FREE_PROBLEM, FREE_NOTE = GIB, 20 * GIB
"""Free bytes of a disk below which the doctor reports a problem, or a note."""
_PACKAGES = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu", "flax", "optax",
             "orbax-checkpoint", "numpy")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGEPAGES = "export GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
_ACCELERATORS = (
    ("an NVIDIA GPU", "/dev/nvidia[0-9]*", ("cuda", "gpu"), "pip install -U 'jaxalign[cuda]'"),
    ("a TPU", "/dev/accel[0-9]*", ("tpu",), "pip install -U 'jaxalign[tpu]'"),
)
"""Accelerators: their name, device files, JAX's platforms for them, and the command that installs the support."""


def examine(workdir: Path) -> list[Finding]:
    """All findings about the machine.

    Args:
      workdir: the folder whose disk a run would fill; it must exist.
    """
    return [versions(), *devices(), huge_pages(), compile_cache(), *disk(workdir)]


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Finding:
    """The versions of Python, jaxalign, JAX and the packages that numbers depend on."""
    found = {name: version_of(name) for name in _PACKAGES}
    listed = {"Python": platform.python_version(), "jaxalign": __version__, "jax": jax.__version__, **found}
    text = ", ".join(f"{name} {version}" for name, version in listed.items() if version)
    behind = [f"{name} {version}" for name, version in found.items()
              if version and name.startswith(("jaxlib", "jax-")) and _minor(version) != _minor(jax.__version__)]
    if behind:
        return Finding("versions", "problem", f"{text}; {' and '.join(behind)} and jax {jax.__version__} must have the same "
                       "version: pip install -U jax with the extra of your device")
    return Finding("versions", "ok", text)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def devices() -> list[Finding]:
    """The devices that JAX sees, and accelerators of the machine that it does not use."""
    try:
        found = jax.devices()
    except RuntimeError as error:  # A missing driver, a device of another process, or an unknown JAX_PLATFORMS.
        reason = str(error).strip().splitlines()[0]
        return [Finding("devices", "problem", f"JAX cannot start: {reason}; if another process holds the device, end it, or "
                        "set JAX_PLATFORMS=cpu to use the CPU")]
    kinds = list(dict.fromkeys(device.device_kind for device in found))
    text = f"{len(found)} x {', '.join(kinds)} (platform {found[0].platform})"
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        text += f", {limit / GIB:.1f} GiB of memory each for JAX"
    if found[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        text += f", {cores} cores, {memory / GIB:.1f} GiB of memory"
    return [Finding("devices", "ok", text), *unused_accelerators(found[0].platform)]


def unused_accelerators(platform: str, exists: Callable[[str], Sequence[str]] = glob.glob) -> list[Finding]:
    """Accelerators whose device files exist, while JAX uses another platform.

    Args:
      platform: the platform that JAX uses.
      exists: the device files that match a pattern.
    """
    chosen = os.environ.get("JAX_PLATFORMS", "")
    findings = []
    for name, pattern, platforms, install in _ACCELERATORS:
        if platform in platforms or not exists(pattern):
            continue
        if chosen:
            text = f"JAX_PLATFORMS={chosen} leaves {name} unused; unset it to use the device"
        else:
            text = f"the machine has {name}, but JAX uses the platform {platform}; {install}"
        findings.append(Finding("devices", "note" if chosen else "problem", text))
    return findings


def huge_pages(setting: Path = _THP) -> Finding:
    """Whether large arrays of the CPU are in huge pages, which makes XLA on some virtual machines several times faster.

    Args:
      setting: the kernel's file, such as "always [madvise] never".
    """
    try:
        mode = re.search(r"\[(\w+)\]", setting.read_text(encoding="utf-8"))
    except OSError:
        mode = None
    if mode is None:
        return Finding("huge pages", "ok", "this system has no setting for them")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if mode[1] == "always" or (mode[1] == "madvise" and "glibc.malloc.hugetlb=1" in tunables):
        return Finding("huge pages", "ok", f"in use (the kernel's setting is {mode[1]})")
    remedy = _HUGEPAGES if mode[1] == "madvise" else f"write madvise to {setting} as root, then {_HUGEPAGES}"
    return Finding("huge pages", "note", f"not in use (the kernel's setting is {mode[1]}); on a CPU a run can be several times "
                   f"faster after: {remedy}")


def compile_cache() -> Finding:
    """The folder of compiled programs: its size, its limit, and whether it can be written."""
    place = cache_folder("")
    if "://" in place:
        return Finding("compile cache", "ok", f"{place}, a bucket, which has no limit of size")
    use_compile_cache("")
    folder, limit = Path(place), cache_limit()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
        files = [(path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        return Finding("compile cache", "note", f"{folder} cannot be read ({error.strerror or error}); every run compiles all "
                       "programs: set config.compile_cache or JAX_COMPILATION_CACHE_DIR to a folder that can be written")
    programs, size = sum(name.endswith("-cache") for name, _ in files), sum(size for _, size in files)
    bound = "without a limit" if limit is None else f"at most {limit / GIB:.3g} GiB"
    text = f"{folder}, {programs} programs, {size / GIB:.2f} GiB ({bound})"
    if not writable:
        return Finding("compile cache", "note", f"{text}; it cannot be written: set config.compile_cache or "
                       "JAX_COMPILATION_CACHE_DIR to a folder that can be")
    return Finding("compile cache", "ok", text)


def disk(workdir: Path) -> list[Finding]:
    """The free space for the work directory and for temporary files."""
    findings = []
    for name, folder in (("disk", workdir), ("temporary disk", Path(os.environ.get("TMPDIR", "/tmp")))):
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            findings.append(Finding(name, "problem", f"{folder} cannot be read: {error.strerror or error}"))
            continue
        if not os.access(folder, os.W_OK):
            remedy = "choose another --workdir" if name == "disk" else "set TMPDIR to a folder that can be written"
            findings.append(Finding(name, "problem", f"{folder} cannot be written; {remedy}"))
            continue
        text = f"{free / GIB:.1f} GiB free in {folder}"
        if free < FREE_NOTE:
            text += ("; free some space or use another disk: a checkpoint takes 12 bytes for each trained parameter, and a "
                     "run keeps several")
        findings.append(Finding(name, "problem" if free < FREE_PROBLEM else "note" if free < FREE_NOTE else "ok", text))
    return findings
