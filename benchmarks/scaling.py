"""Compute weak and strong scaling of a training step over 8 to 512 devices, by the plan and by the compiler, for
docs/scaling.md.

    JAX_PLATFORMS=cpu python benchmarks/scaling.py [--mfu=0.5]
    JAX_PLATFORMS=cpu python benchmarks/scaling.py --compile [DEVICES ...]     (pip install 'jaxalign[aot]')

The step is supervised fine-tuning of all weights of Llama-3.1-8B on rows of 2048 tokens, with remat, on TPU v5p. Weak: every
device has 2 rows. Strong: the step has 128 rows; where fsdp would leave a device less than a row, the mesh is the plan's
choice.

With --compile the step of each row of both tables, or of the rows with the given numbers of devices, is also compiled for its
topology, which takes a minute each. The compiler's figures are saved in benchmarks/scaling.json: FLOPs of the matrix products
(multiplied by loop iterations; those of fused attention are inside a kernel and not counted), bytes sent by the collectives of
the compiled text, and peak memory. The time on the network follows from those bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path

from common import run_main

from jaxalign.config import Config, from_config_dict
from jaxalign.errors import UserError
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner import estimate, search, shapes, work
from jaxalign.planner.compiled import compile_run
from jaxalign.planner.hardware import tpu_cluster
from jaxalign.planner.network import bandwidths
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.planner.weights import measure
from jaxalign.train import read_values

TOPOLOGIES = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}
KEPT = Path(__file__).with_suffix(".json")
SHAPE = "Llama-3.1-8B"
LENGTH = 2048
SCALINGS = {"weak": lambda devices: 2 * devices, "strong": lambda devices: 128}
"""Rows per step as a function of the number of devices."""
HEAD = ("...d,dv->...v", "bcv,dv->bcd", "pbqcd,pbqcv->pqdv")
"""Names of the collectives that belong to the products of models/heads.py."""


def sft(rows: int) -> Config:
    """Return a config for fine-tuning all weights with `rows` rows per step."""
    values, _, _ = read_values(["scaling", "--config=configs/real_size.py:llama31_8b_h100x8"])
    values.model.path = values.data.train = "not read by a plan"
    values.stages, values.model.remat_saves = ("sft",), "nothing"
    values.model.max_length = values.sft.row_length = LENGTH
    values.sft.batch_rows, values.mesh.fsdp = rows, 1
    return from_config_dict(values)


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of one step if bound only by compute, by the network for the layers, or by the network for the LM head."""

    mesh: str
    compute: float
    layers: float
    head: float
    seconds: float
    fits: bool


def step(given: search.Given, run: estimate.RunEstimate) -> Step:
    """A planned step, with its traffic split into that of the layers and that of the LM head."""
    task, assume, mesh = run.tasks[0], given.assumptions, run.config.mesh
    model = dataclasses.replace(given.policy, sharding=estimate.abstract_sharding(mesh))
    layers = work.update(model, measure(model, "float32"), dataclasses.replace(task.task, counted=0), mesh.slices).sent
    speed = bandwidths(run.cluster, {axis: getattr(mesh, axis) for axis in estimate.AXES}, mesh.slices)

    def of(sizes: dict[str, float]) -> float:
        return sum(size / (speed[axis] * assume.network) for axis, size in sizes.items() if size)

    return Step(search.mesh_words(mesh), task.compute, of(layers), task.network - of(layers), task.seconds, run.fits)


def given(args, devices: int, rows: int) -> search.Given:
    config = sft(rows)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=devices))
    cluster = tpu_cluster(parse_topology(f"v5p:{TOPOLOGIES[devices]}"))
    assume = estimate.Assumptions(args.mfu, args.hbm, args.network)
    return search.Given(config, shapes.policy_model(config, estimate.abstract_sharding(config.mesh), SHAPE), cluster, assume)


def runs(args, devices: int, rows: int) -> tuple[search.Given, dict[str, estimate.RunEstimate]]:
    """Return the step with fsdp over all devices, and with a faster mesh of the plan, if there is one."""
    plan, found = given(args, devices, rows), {}
    try:
        found["fsdp"] = plan.estimate()
    except UserError:  # There are fewer rows than devices.
        pass
    best = search.possible(plan)
    if best and best[0].fits and ("fsdp" not in found or best[0].seconds < 0.99 * found["fsdp"].seconds):
        found["best"] = best[0]
    return plan, found


def table(args, rows_of) -> list[str]:
    """Format the plan's figures as markdown."""
    lines = [
        "| devices | topology | tokens per device | mesh | compute, s | network for layers, s | for the LM head, s | step, s | "
        "tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}
    for devices in TOPOLOGIES:
        rows = rows_of(devices)
        plan, planned = runs(args, devices, rows)
        for kind, run in planned.items():
            found = step(plan, run)
            speed = rows * LENGTH / found.seconds
            share = speed / devices / first.setdefault(kind, speed / devices)
            lines.append(
                f"| {devices} | {plan.cluster.name} | {rows * LENGTH // devices:,} | {found.mesh} | {found.compute:.2f} | "
                f"{found.layers:.2f} | {found.head:.2f} | {found.seconds:.2f} | {speed:,.0f} | {share:.0%} |"
            )
    return lines


def key(run: estimate.RunEstimate) -> str:
    """Return the key of a compiled step in the saved file."""
    return f"{run.cluster.name} {search.mesh_words(run.config.mesh)} {run.config.sft.batch_rows} rows"


def compile_step(run: estimate.RunEstimate) -> dict:
    """Compile one step and return the compiler's figures per device."""
    topology = parse_topology(run.cluster.name)
    policy = shapes.policy_model(run.config, make_sharding(run.config.mesh, topology_devices(topology)), SHAPE)
    (found,) = compile_run(run.config, policy, programs=("sft update",))
    sent: dict[str, dict[str, float]] = {"layers": {}, "head": {}}
    for one in found.collectives:
        part = sent["head" if any(name in one.op_name for name in HEAD) else "layers"]
        axes = "+".join(one.axes)
        part[axes] = part.get(axes, 0.0) + one.total
    return {"flops": found.products, "sent": sent, "peak": found.total, "seconds": round(found.seconds)}


def network(args, run: estimate.RunEstimate, sent: dict[str, float]) -> float:
    """Return the seconds for these bytes; traffic over several axes has the speed of the slowest."""
    speed = bandwidths(run.cluster, {axis: getattr(run.config.mesh, axis) for axis in estimate.AXES})

    def slowest(axes: str) -> float:
        return min(speed[axis] for axis in (axes.split("+") if axes else speed))

    return sum(size / (slowest(axes) * args.network) for axes, size in sent.items())


def compared(args, kept: dict, rows_of) -> list[str]:
    """Format the figures of compiler and plan as markdown, with the time that follows from the compiler's."""
    lines = [
        "| devices | mesh | tokens per device | TFLOP: plan | compiler | GB sent: plan | compiler | LM head only | "
        "peak, GB: plan | compiler | compute, s | network for layers, s | for the LM head, s | equal at, tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for devices in TOPOLOGIES:
        rows = rows_of(devices)
        plan, planned = runs(args, devices, rows)
        for run in planned.values():
            said = kept.get(key(run))
            if said is None:
                continue
            task, tokens = run.tasks[0], rows * LENGTH // devices
            compute = said["flops"] / (plan.cluster.chip.bf16_flops * args.mfu)
            layers, head = (network(args, run, said["sent"][part]) for part in ("layers", "head"))
            sent = {part: sum(sizes.values()) / 1e9 for part, sizes in said["sent"].items()}
            lines.append(
                f"| {devices} | {search.mesh_words(run.config.mesh)} | {tokens:,} | {task.work.flops / 1e12:.0f} | "
                f"{said['flops'] / 1e12:.0f} | {sum(task.work.sent.values()) / 1e9:.0f} | {sum(sent.values()):.0f} | "
                f"{sent['head']:.0f} | {task.peak / 1e9:.1f} | {said['peak'] / 1e9:.1f} | {compute:.2f} | {layers:.2f} | "
                f"{head:.2f} | {tokens * layers / compute:,.0f} |"
            )
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mfu", type=float, default=0.5)
    parser.add_argument("--hbm", type=float, default=0.8)
    parser.add_argument("--network", type=float, default=0.8)
    parser.add_argument("--compile", type=int, nargs="*", metavar="DEVICES", help="compile these device counts; default: all")
    args = parser.parse_args(argv)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if args.compile is not None:
        versions = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
        for devices in args.compile or TOPOLOGIES:
            for rows_of in SCALINGS.values():
                for run in runs(args, devices, rows_of(devices))[1].values():
                    kept |= {key(run): compile_step(run), "versions": versions}
                    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
                    print(f"{key(run)}: {kept[key(run)]['seconds']} s", file=sys.stderr, flush=True)
    for name, rows_of in SCALINGS.items():
        print("\n".join([f"{name}, by the plan", "", *table(args, rows_of), ""]))
        print("\n".join([f"{name}, by the compiler", "", *compared(args, kept, rows_of), ""]))
    return 0


if __name__ == "__main__":
    run_main(main)
