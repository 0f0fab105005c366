"""Test and measure jaxalign on the first GPU and write one file: `python benchmarks/gpu.py --results gpu_results.json`.

The parts are the doctor's findings, a run of Llama-3.2-1B with adapters beside its plan, the tests of the folders that compute
on the device, a comparison of repeated runs, and the attention kernels. Each is a process with a limit of time. All together
end before --seconds (default 475): a part with less time left is ended earlier, or not run if it has less than 15 s, and its
finding says so. The rates of sampling and of PPO's update at larger sizes run only with --only. Parts that measure time run
alone; the tests and the comparison run at the same time. The file has the device, the versions, the figures and the whole
output of every part. It is written again whenever a part has ended, so that an interrupted run keeps what it has measured.
`--list` prints the commands.

Tests compute float32 products in full precision, because their tolerances are those of float32, and with deterministic kernels,
because some compare bits. All other parts have JAX's defaults (TF32).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MARKS = "not cpu and not mesh and not process and not parity and not slow"
TESTS = (
    "tests/models/test_attention.py", "tests/models/test_attention_fused.py", "tests/models/test_decoder.py", "tests/rl",
    "tests/rollout", "tests/steps", "tests/trainers",
)
"""Tests whose code runs on the device."""
_LARGE = ("--dim", "2048", "--heads", "32", "--ffn", "8192", "--vocab", "32768", "--dtype", "bfloat16", "--prompt", "256")
_WORKERS = 10
_LEAST = 15.0
"""Seconds under which a part is not started."""
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flax",
             "optax", "orbax-checkpoint", "numpy")
_CARD = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit,temperature.gpu"


class Part(NamedTuple):
    """words: the arguments of Python. seconds: the limit. result: whether `--out FILE` makes it write a JSON object. shared:
    whether it can run at the same time as the shared part before it."""

    words: tuple[str, ...]
    seconds: float
    result: bool = True
    shared: bool = False


def benchmark(name: str, *words: str) -> tuple[str, ...]:
    return f"benchmarks/{name}.py", *words


PARTS: Mapping[str, Part] = {
    "doctor": Part(("-m", "jaxalign.doctor", "--json"), 90, False),
    "attention": Part(benchmark("attention"), 70),
    "real_run": Part(benchmark("real_run"), 260),
    "tests": Part(
        ("-m", "pytest", *TESTS, "-n", str(min(_WORKERS, max(1, (os.cpu_count() or 1) - 2))), "-m", MARKS, "-vv",
         "--tb=short", "-p", "no:cacheprovider", "-p", "benchmarks.show_failures"), 130, False, True,
    ),
    "repeat": Part(benchmark("repeat", *_LARGE, "--layers", "2", "--batch", "16", "--new", "64", "--steps=3"), 130, True, True),
}
"""The parts of the default set. On an NVIDIA H200 with 16 CPU cores doctor took 58 s, attention 38 s and real_run 249 s, mostly
compilation; so 130 s are left for the tests and the comparison."""
LONGER: Mapping[str, Part] = {
    "rollout": Part(benchmark("rollout", *_LARGE, "--layers", "16", "--batch", "128", "--queue", "256", "--pairs=2"), 300),
    "update_rate": Part(benchmark("update_rate", *_LARGE, "--layers", "8", "--batch", "16", "--new", "256", "--pairs=2"), 300),
}
"""The parts that run only by name."""


class Done(NamedTuple):
    """The end of a process. code: its exit code; None if it was ended at its limit. output: stdout and stderr."""

    code: int | None
    output: str
    seconds: float


def measure(results: Path, parts: Mapping[str, Part] = PARTS, seconds: float = 475.0,
            platform: str = "cuda") -> Iterator[Finding]:
    """Run the parts and yield their findings.

    Args:
      results: the JSON file to write.
      parts: the parts by name, in order.
      seconds: the limit of all parts together.
      platform: the value of JAX_PLATFORMS; a GPU also has the CPU.

    Raises:
      UserError: there is no such device, or the file cannot be written.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "JAX_COMPILATION_CACHE_DIR": cache,
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        }
        content: dict[str, Any] = {
            "device": _first_device(environment, platform), "card": _card(), "versions": dict(_versions()), "commit": _commit(),
            "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "parts": {},
        }
        yield Finding("device", "ok", content["device"] + (f" ({content['card']})" if content["card"] else ""))
        for group in _groups(parts):
            _write(results, content)
            left = seconds - (time.perf_counter() - began)
            if left < _LEAST:
                content["parts"] |= {name: {"code": None, "output": "", "seconds": 0.0} for name in group}
                late = f"not run: the {seconds:.0f} s of --seconds are over; raise it, or use --only"
                yield from (Finding(name, "problem", late) for name in group)
                continue
            running: list[subprocess.Popen] = []
            start = functools.partial(_run_part, parts, environment, left, len(group), running)
            with ThreadPoolExecutor(len(group)) as pool:
                try:
                    ended = list(pool.map(start, group))
                except BaseException:  # Ctrl-C does not reach the parts, which have sessions of their own.
                    for process in running:
                        _end_session(process)
                    raise
            for name, (done, result) in zip(group, ended, strict=True):
                content["parts"][name] = {"command": shlex.join(parts[name].words), **done._asdict(), "result": result}
                yield from _findings(name, parts[name], done, content["parts"][name])
        content["seconds"] = time.perf_counter() - began
        _write(results, content)
    yield Finding("results", "ok", f"written to {results}, after {content['seconds']:.0f} s")


def _groups(parts: Mapping[str, Part]) -> list[list[str]]:
    """Group the names of the parts; parts of one group run at the same time."""
    groups: list[list[str]] = []
    for name, part in parts.items():
        if part.shared and groups and parts[groups[-1][-1]].shared:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _run_part(parts: Mapping[str, Part], environment: Mapping[str, str], left: float, together: int,
              running: list[subprocess.Popen], name: str) -> tuple[Done, Any]:
    """Return the end of a part and its JSON object, or None. together: the number of parts that run at the same time; running:
    gets the process."""
    part = parts[name]
    added = _for_tests() if name == "tests" else {}
    if together > 1:  # No process may reserve the memory of the others.
        added |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = (*part.words, "--out", str(out)) if part.result else part.words
        done = _run([sys.executable, *words], {**environment, **added}, min(part.seconds, left), running)
        return done, json.loads(out.read_text(encoding="utf-8")) if done.code == 0 and out.exists() else None


def _for_tests() -> dict[str, str]:
    # XLA_FLAGS that name a device count keep conftest.py from setting options that are for CPUs.
    added = ("--xla_force_host_platform_device_count=1", "--xla_gpu_autotune_level=0", "--xla_gpu_deterministic_ops=true")
    return {"XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *added]).strip(), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def _findings(name: str, part: Part, done: Done, content: dict[str, Any]) -> Iterator[Finding]:
    if name == "doctor":
        lines = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"topic"')]
        yield from (Finding(**line) for line in lines)
        if done.code not in (0, 1):
            yield Finding(name, "problem", _end(done, part))
    elif name == "tests":
        yield _test_finding(done, part, content)
    elif done.code == 0:
        table = [line for line in done.output.splitlines() if line.startswith("|")]
        yield Finding(name, "ok", f"{done.seconds:.0f} s" + "".join(f"\n    {line}" for line in table))
    else:
        yield Finding(name, "problem", _end(done, part))


def _test_finding(done: Done, part: Part, content: dict[str, Any]) -> Finding:
    """Count the tests by outcome; after the limit, those that had ended."""
    outcomes: dict[str, str] = {}
    for outcome, test in re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+)", done.output):
        outcomes[test] = outcome.lower()
    for test, outcome in re.findall(r"(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)", done.output):
        outcomes[test] = outcome.lower()
    counts = {kind: sum(outcome == kind for outcome in outcomes.values()) for kind in ("passed", "failed", "error", "skipped")}
    content["counts"] = counts
    content["failed"] = [test for test, outcome in outcomes.items() if outcome in ("failed", "error")]
    text = ", ".join(f"{number} {kind}" for kind, number in counts.items()) + f" in {done.seconds:.0f} s"
    named = "".join(f"\n    {test}" for test in content["failed"])
    if done.code == 0:
        return Finding("tests", "ok", text)
    if done.code is None and not named:
        return Finding("tests", "note", f"{text}; ended at the limit of {done.seconds:.0f} s, with the other tests not run")
    return Finding("tests", "problem", f"{text}{named}" if named else f"{text}; {_end(done, part)}")


def _run(command: Sequence[str], environment: Mapping[str, str], limit: float, running: list[subprocess.Popen]) -> Done:
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        # A session of its own, so that the limit ends the processes of the part too.
        process = subprocess.Popen(command, env=dict(environment), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        running.append(process)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Done(code, text, time.perf_counter() - began)


def _end_session(process: subprocess.Popen) -> None:
    """End all processes of the part: pytest's workers outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _first_device(environment: Mapping[str, str], platform: str) -> str:
    """Return the kind of the first device. Another process asks for it: this one would hold the memory of the GPU."""
    done = _run([sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"], environment, 120, [])
    if done.code != 0:
        raise UserError(f"JAX {importlib.metadata.version('jax')} finds no device of the platform {platform}; on a machine "
                        "with an NVIDIA GPU, pip install -U 'jaxalign[cuda]'")
    return done.output.strip().splitlines()[-1]


def _card() -> str:
    """Return what the driver says about the card, or an empty string."""
    try:
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        done = subprocess.run(["nvidia-smi", "-i", card, f"--query-gpu={_CARD}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", sys.version.split()[0]
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass


def _commit() -> str:
    """Return the commit of this clone, or an empty string."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _end(done: Done, part: Part) -> str:
    lines = done.output.strip().splitlines()
    reason = f"ended with code {done.code}" if done.code is not None else f"ended at its limit, after {done.seconds:.0f} s"
    return f"{reason}: {lines[-1]}" if lines else reason


def _write(results: Path, content: Mapping[str, Any]) -> None:
    try:
        results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--results={results} cannot be written ({error.strerror or error}); give another file") from None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("gpu_results.json"), help="the file to write")
    parser.add_argument("--seconds", type=float, default=475.0, help="the limit of all parts together")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, *LONGER], default=list(PARTS), help="the parts, in this order")
    parser.add_argument("--platform", default="cuda", help="the platform of JAX: cuda, or cpu to try the program")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    options = parser.parse_args(argv)
    chosen = {name: {**PARTS, **LONGER}[name] for name in options.only}
    if options.list:
        print("\n".join(f"{name}: python {shlex.join(part.words)}" for name, part in chosen.items()))
        return 0
    problems = 0
    for finding in _until_error(measure(options.results.absolute(), chosen, options.seconds, options.platform)):
        print(json.dumps(finding._asdict()) if options.json else finding.line(), flush=True)
        problems += finding.status == "problem"
    return int(problems > 0)


def _until_error(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings, and a UserError as the last one."""
    try:
        yield from findings
    except UserError as error:
        yield Finding("gpu", "problem", str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
