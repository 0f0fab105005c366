"""Weak and strong scaling of a training step over 8 to 512 devices, from the plan: tables for docs/scaling.md.

    JAX_PLATFORMS=cpu python benchmarks/scaling.py [--shape=Llama-3.1-8B] [--mfu=0.5]
    JAX_PLATFORMS=cpu python benchmarks/scaling.py --compile 8 64 512     (pip install 'jaxalign[aot]')

The step is supervised fine-tuning of all weights on rows of 2048 tokens, with remat, on TPU v5p. Weak: every device has 2 rows.
Strong: the step has 128 rows; where fsdp alone would leave a device less than a row, the mesh is the plan's. With --compile the
step is compiled for so many devices too (weak scaling, fsdp alone), and what the compiler counts is kept in
benchmarks/scaling.json and set beside the plan's figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from jaxalign.config import Config, from_config_dict
from jaxalign.errors import UserError
from jaxalign.parallel.sharding import make_sharding
from jaxalign.placement import estimate, search, shapes, work
from jaxalign.placement.compiled import compile_run
from jaxalign.placement.compiled_report import sent
from jaxalign.placement.hardware import tpu_cluster
from jaxalign.placement.network import bandwidths
from jaxalign.placement.topology import parse_topology, topology_devices
from jaxalign.placement.weights import measure
from jaxalign.train import read_values

TOPOLOGIES = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
KEPT = Path(__file__).with_suffix(".json")
LENGTH = 2048


def sft(rows: int) -> Config:
    """Fine-tuning of all weights on so many rows a step."""
    values, _, _ = read_values(["scaling", "--config=configs/real_size.py:llama31_8b_h100x8"])
    values.model.path = values.data.train = "not read by a plan"
    values.stages = ("sft",)
    values.model.max_length = values.sft.row_length = LENGTH
    values.sft.batch_rows, values.mesh.fsdp = rows, 1
    return from_config_dict(values)


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of one step were it bound by that alone: compute; the network for the layers, and for the LM head."""

    mesh: str
    compute: float
    layers: float
    head: float
    seconds: float
    fits: bool


def step(given: search.Given, run: estimate.RunEstimate) -> Step:
    """A planned step, its traffic split in that of the layers and that of the LM head."""
    task, assume, mesh = run.tasks[0], given.assumptions, run.config.mesh
    model = dataclasses.replace(given.policy, sharding=estimate.abstract_sharding(mesh))
    layers = work.update(model, measure(model, "float32"), dataclasses.replace(task.task, counted=0), mesh.slices).sent
    speed = bandwidths(run.cluster, {axis: getattr(mesh, axis) for axis in estimate.AXES}, mesh.slices)
    of = lambda sizes: sum(size / (speed[axis] * assume.network) for axis, size in sizes.items() if size)  # noqa: E731
    return Step(search.mesh_words(mesh), task.compute, of(layers), task.network - of(layers), task.seconds, run.fits)


def given(args, devices: int, rows: int) -> search.Given:
    config = sft(rows)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=devices))
    cluster = tpu_cluster(parse_topology(f"v5p:{TOPOLOGIES[devices]}"))
    assume = estimate.Assumptions(args.mfu, args.hbm, args.network)
    return search.Given(config, shapes.policy_model(config, None, args.shape), cluster, assume)


def table(args, rows_of) -> list[str]:
    """Markdown: fsdp over all devices, and the mesh that the plan finds the fastest."""
    lines = [
        "| devices | topology | tokens a device | mesh | compute, s | network for layers, s | for the LM head, s | step, s | "
        "tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}
    for devices in TOPOLOGIES:
        rows = rows_of(devices)
        plan = given(args, devices, rows)
        runs = {}
        try:
            runs["fsdp"] = plan.estimate()
        except UserError:  # Fewer rows than devices.
            pass
        best = search.possible(plan)
        if best and best[0].fits and ("fsdp" not in runs or best[0].seconds < 0.99 * runs["fsdp"].seconds):
            runs["best"] = best[0]
        for kind, run in runs.items():
            found = step(plan, run)
            speed = rows * LENGTH / found.seconds
            share = speed / devices / first.setdefault(kind, speed / devices)
            lines.append(
                f"| {devices} | {plan.cluster.name} | {rows * LENGTH // devices:,} | {found.mesh} | {found.compute:.2f} | "
                f"{found.layers:.2f} | {found.head:.2f} | {found.seconds:.2f} | {speed:,.0f} | {share:.0%} |"
            )
    return lines


def compile_step(args, devices: int) -> dict:
    """What the compiler counts of the weak step on so many devices."""
    plan = given(args, devices, 2 * devices)
    topology = parse_topology(f"v5p:{TOPOLOGIES[devices]}")
    policy = shapes.policy_model(plan.config, make_sharding(plan.config.mesh, topology_devices(topology)), args.shape)
    (found,) = compile_run(plan.config, policy, programs=("sft update",))
    return {"sent": sent(found), "peak": found.total, "seconds": found.seconds}


def compared(args, kept: dict) -> list[str]:
    lines = ["| devices | sent, plan, GB | sent, compiler, GB | peak, plan, GB | peak, compiler, GB |", "|---|---|---|---|---|"]
    for devices, said in sorted(kept.items(), key=lambda item: int(item[0])):
        task = given(args, int(devices), 2 * int(devices)).estimate().tasks[0]
        lines.append(
            f"| {devices} | {sum(task.work.sent.values()) / 1e9:.1f} | {sum(said['sent'].values()) / 1e9:.1f} | "
            f"{task.peak / 1e9:.2f} | {said['peak'] / 1e9:.2f} |"
        )
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.1-8B")
    parser.add_argument("--mfu", type=float, default=0.5)
    parser.add_argument("--hbm", type=float, default=0.8)
    parser.add_argument("--network", type=float, default=0.8)
    parser.add_argument("--compile", type=int, nargs="*", default=[], metavar="DEVICES", help="compile for so many devices too")
    args = parser.parse_args(argv)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for devices in args.compile:
        kept[str(devices)] = compile_step(args, devices)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print("\n".join(["Weak", "", *table(args, lambda devices: 2 * devices), "", "Strong", "", *table(args, lambda _: 128)]))
    if kept:
        print("\n".join(["", "Against the compiler", "", *compared(args, kept)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
