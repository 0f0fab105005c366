"""Runs tests and benchmarks of the repository on the first GPU and writes their results to one file.

Every part is a process of its own, so that a crash ends only that part. The file is written again after each part; an
interrupted run therefore keeps what it has measured.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxalign.diagnosis.findings import Finding
from jaxalign.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/models", "tests/rl", "tests/rollout", "tests/steps", "tests/trainers")
"""The folders of tests whose code runs on the device."""
MARKS = "not mesh and not process and not parity and not slow"
BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "ppo_iteration": ("ppo_iteration.py", "--stop", "none", "--pairs", "3"),
    "rollout": ("rollout.py", "--pairs", "3"),
    "update_rate": ("update_rate.py", "--pairs", "3"),
    "first_step": ("first_step.py", "--pairs", "1"),
    "logprob_memory": ("logprob_memory.py",),
}
"""The commands in benchmarks/, by the name of their results."""
TIMEOUT = 1800.0
"""Seconds after which a part is ended."""
_FAILED = 20


class Part(NamedTuple):
    """The end of one process. code: its exit code; None after `TIMEOUT`. output: stdout and stderr."""

    code: int | None
    output: str


def measure(results: Path, platform: str = "cuda", tests: Sequence[str] = TESTS,
            benchmarks: Mapping[str, Sequence[str]] = BENCHMARKS) -> Iterator[Finding]:
    """Runs self-test, tests and benchmarks, and yields a finding for each.

    Args:
      results: the JSON file to write.
      platform: the value of JAX_PLATFORMS for the processes.
      tests: files or folders for pytest.
      benchmarks: the script in benchmarks/ and its flags, by name.

    Raises:
      UserError: there is no such device or no clone of the repository, or the file cannot be written.
    """
    device = _first_device(platform)
    if not (ROOT / "benchmarks").is_dir() or not (ROOT / "tests").is_dir():
        raise UserError(f"--gpu runs the folders tests and benchmarks of the repository, and {ROOT} has none; run it in a "
                        "clone, after pip install -e '.[cuda,test]'")
    content: dict[str, Any] = {"device": device, "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    _write(results, content)
    environment = os.environ | {
        "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "PYTHONPATH": str(ROOT),
    }
    yield from _self_test(content, environment)
    _write(results, content)
    yield _tests(content, environment, tests)
    _write(results, content)
    content["benchmarks"] = {}
    for name, (script, *words) in benchmarks.items():
        yield _benchmark(content["benchmarks"], environment, name, [str(ROOT / "benchmarks" / script), *words])
        _write(results, content)
    yield Finding("results", "ok", f"written to {results}")


def _first_device(platform: str) -> str:
    """The kind of the first device of a platform. Another process asks for it: this one would hold the memory of the GPU."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    found = _run([sys.executable, "-c", code], os.environ | {"JAX_PLATFORMS": platform})
    if found.code != 0:
        raise UserError(f"--gpu needs a GPU, and JAX {jax.__version__} finds no device of the platform {platform}; on a "
                        "machine with an NVIDIA GPU, pip install -U 'jaxalign[cuda]'")
    return found.output.strip().splitlines()[-1]


def _run(command: Sequence[str], environment: Mapping[str, str]) -> Part:
    try:
        done = subprocess.run(command, env=dict(environment), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return Part(None, output if isinstance(output, str) else output.decode(errors="replace"))
    return Part(done.returncode, done.stdout)


def _self_test(content: dict[str, Any], environment: Mapping[str, str]) -> Iterator[Finding]:
    done = _run([sys.executable, "-m", "jaxalign.doctor", "--json"], environment)
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"topic"')]
    content["doctor"] = lines
    if done.code not in (0, 1):
        yield Finding("self-test", "problem", _end(done))
    yield from (Finding(**line) for line in lines)


def _tests(content: dict[str, Any], environment: Mapping[str, str], tests: Sequence[str]) -> Finding:
    # XLA_FLAGS that name a device count keep conftest.py from setting options that are for CPUs. Tolerances of the tests are
    # those of float32 products; GPUs use TF32 by default.
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1".strip()
    tuned = {"XLA_FLAGS": flags, "JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = _run([sys.executable, "-m", "pytest", *tests, "-n", "0", "-m", MARKS, "-rfE", "-p", "no:cacheprovider"],
                {**environment, **tuned})
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.output, re.MULTILINE)
    counts = {word.rstrip("s"): int(number) for number, word in
              re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected)\b", done.output)}
    content["tests"] = {"code": done.code, "counts": counts, "failed": failed, "folders": list(tests)}
    text = ", ".join(f"{number} {word}" for word, number in counts.items())
    if done.code == 0:
        return Finding("tests", "ok", text)
    content["tests"]["output"] = done.output[-20_000:]
    named = "".join(f"\n    {name}" for name in failed[:_FAILED])
    return Finding("tests", "problem", f"{text or _end(done)}{named}")


def _benchmark(content: dict[str, Any], environment: Mapping[str, str], name: str, words: Sequence[str]) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        done = _run([sys.executable, *words, "--out", str(out)], environment)
        if done.code != 0 or not out.exists():
            content[name] = {"code": done.code, "output": done.output[-5000:]}
            return Finding(f"benchmark {name}", "problem", _end(done))
        content[name] = json.loads(out.read_text(encoding="utf-8"))
    table = [line for line in done.output.splitlines() if line.startswith("|")]
    return Finding(f"benchmark {name}", "ok", "".join(f"\n    {line}" for line in table) or "done")


def _end(done: Part) -> str:
    lines = done.output.strip().splitlines()
    reason = f"ended with code {done.code}" if done.code is not None else f"took longer than {TIMEOUT:.0f} s"
    return f"{reason}: {lines[-1]}" if lines else reason


def _write(results: Path, content: Mapping[str, Any]) -> None:
    try:
        results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--results={results} cannot be written ({error.strerror or error}); give another file") from None
