"""Time a decoding step of a variant of configs/real_size.py on the first device: `python benchmarks/decode.py`.

The program is the one that the plan compiles for PPO's sampling: 32 steps of all rows, with random weights and empty rings of
full length. Each of --settings is compiled in a process of its own. All compile at the same time; then one after another is
timed. The result is the median time of a step, and from the profiler the number of kernels per step and their total time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from common import STD, at_least, progress, report, run_main

from jaxalign.commands import MEMORY_SHARE
from jaxalign.config import Config, from_config_dict
from jaxalign.errors import UserError
from jaxalign.models import model as models
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner import shapes
from jaxalign.planner.compiled import run_programs
from jaxalign.planner.programs import PlannedProgram
from jaxalign.rollout import ring
from jaxalign.rollout.sampling import section_sampling
from jaxalign.train import read_values


class Setting(NamedTuple):
    """How to compile the program.

    Attributes:
      flags: for XLA_FLAGS.
      unstacked: whether the layers are copied out of their stacks before the first step; None: as `models.unstacked` says.
      step: the jitted function, if not that of the plan; `ring.decode_chunk` lets XLA merge products.
      scanned: whether the layers are scanned.
      fields: changes of the config, as NAME=VALUE.
    """

    flags: str = ""
    unstacked: bool | None = None
    step: Callable | None = None
    scanned: bool = False
    fields: tuple[str, ...] = ()


SETTINGS = {
    "default": Setting(),
    "in place": Setting(unstacked=False),
    "stacked": Setting(unstacked=False, step=ring.decode_chunk_on_gpus),
    "scanned": Setting(step=ring.decode_chunk, scanned=True),
    "no graphs": Setting("--xla_gpu_enable_command_buffer="),
    "no adapters": Setting(fields=("lora.rank=0", "lora.base=float32")),
}


def sampling_program(options: argparse.Namespace, fields: tuple[str, ...]) -> tuple[Config, PlannedProgram]:
    """Return the config and its program of PPO's sampling."""
    one = (f"mesh.{axis}=1" for axis in ("data", "fsdp", "tensor"))
    given = ["model.path=nowhere", "data.train=nowhere", *one, *fields]
    values, _, _ = read_values(["plan", f"--config=configs/real_size.py:{options.variant}", *(f"--config.{x}" for x in given)])
    config = from_config_dict(values)
    policy = shapes.policy_model(config, make_sharding(config.mesh, jax.devices()[:1]), options.shape)
    for program in run_programs(config, policy, options.prompt):
        if (program.stage, program.phase) == ("ppo", "sampling"):
            return config, program
    raise UserError(f"the variant {options.variant} has no PPO")


def arrays(config: Config, program: PlannedProgram) -> list[Any]:
    """Return the arrays of the program's arguments: random weights, empty rings, rows that go on to the end, and control."""
    _, params, tiers, rows, _, *static = program.arguments
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def draw(leaf, key):
        return (STD * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    weights = jax.jit(lambda keys: [draw(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])(keys)
    empty = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), tiers)
    columns = np.zeros(rows.shape, np.int32)
    columns[0], columns[1], columns[2], columns[3] = 1, config.model.max_length // 2, 2**20, np.arange(rows.shape[1])
    settings = section_sampling(config.ppo, (2,)).packed(jax.random.key(0))
    columns[4:] = -1  # Not a stop id.
    columns[4 : 4 + len(settings)] = settings[:, None]
    steps, limit = static[-1], 2 * rows.shape[1]
    return [jax.tree.unflatten(tree, weights), empty, columns, np.asarray([0, steps, limit], np.int32)]


def time_setting(options: argparse.Namespace) -> dict[str, Any]:
    """Compile the program with the setting and time it."""
    setting = SETTINGS[options.child]
    if setting.scanned:
        models.LAYERED = {}  # No platform unrolls the layers.
    if setting.unstacked is not None:
        models.unstacks = ring.unstacks = lambda model, params: setting.unstacked
    config, program = sampling_program(options, setting.fields)
    began = time.perf_counter()
    compiled = (setting.step or program.step).lower(*program.arguments).compile()
    compile_s = time.perf_counter() - began
    print("compiled", flush=True)
    sys.stdin.readline()  # Wait until all others are compiled and no other is timed.
    params, tiers, rows, control = arrays(config, program)

    def call() -> float:
        nonlocal tiers
        began = time.perf_counter()
        tiers, drawn = compiled(params, tiers, rows, control)
        steps = int(jax.device_get(drawn.steps))
        return (time.perf_counter() - began) / steps

    call()
    seconds = [call() for _ in range(options.repeats)]
    kernels = profiled(call, int(control[1]))
    progress(f"{options.child}: {1e3 * statistics.median(seconds):.2f} ms, compiled in {compile_s:.0f} s")
    memory = compiled.memory_analysis()
    return {
        "step_ms": [1e3 * s for s in seconds], "compile_s": compile_s, **kernels,
        "weights_bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
        "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(tiers)),
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


def profiled(call, steps: int) -> dict[str, Any]:
    """Return the kernels' number and milliseconds per step, and the kernels that took longest, from a trace of one call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(files[0]))
    total, count = collections.Counter(), collections.Counter()
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                total[event.name] += event.duration_ns
                count[event.name] += 1
    longest = [[name[:80], ns / steps / 1e6, count[name] / steps] for name, ns in total.most_common(20)]
    return {"kernels": sum(count.values()) / steps, "kernels_ms": sum(total.values()) / steps / 1e6, "longest": longest}


def start(name: str, argv: list[str]) -> subprocess.Popen:
    """Start the process of a setting."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {SETTINGS[name].flags}".strip(),
                                "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": str(MEMORY_SHARE)}
    words = [sys.executable, __file__, *argv, "--child", name]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="llama32_1b", help="of configs/real_size.py, on one device")
    parser.add_argument("--shape", default="Llama-3.2-1B", choices=list(shapes.published_shapes()))
    parser.add_argument("--prompt", type=at_least(1), default=512, help="tokens of the longest prompt")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="timed calls of 32 steps")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--child", choices=SETTINGS, help="time this setting and print its JSON object")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    if options.child is not None:
        print(json.dumps(time_setting(options)))
        return 0
    children, results = {name: start(name, argv) for name in options.settings}, {}
    for child in children.values():
        if child.stdout.readline().strip() != "compiled":
            child.kill()
    for name, child in children.items():
        output, _ = child.communicate("go\n" if child.poll() is None else None)
        results[name] = json.loads(output.strip().splitlines()[-1]) if child.returncode == 0 else None
    if not any(results.values()):
        raise UserError("no program could be compiled and timed; the errors are above")
    lines = ["| setting | ms per step | kernels, ms | kernels | compile, s |", "|---|---|---|---|---|"]
    for name, found in results.items():
        if found is None:
            lines.append(f"| {name} | failed | | | |")
        else:
            lines.append(f"| {name} | {statistics.median(found['step_ms']):.2f} | {found['kernels_ms']:.2f} | "
                         f"{found['kernels']:.0f} | {found['compile_s']:.0f} |")
    return report(options, "decode", {"results": results}, lines)


if __name__ == "__main__":
    run_main(main)
