"""Compare the memory in the plan with that of the compiler for the same programs, as a table.

    pip install 'jaxalign[aot]'
    JAX_PLATFORMS=cpu python benchmarks/plan_accuracy.py --compile [NAME ...]
    JAX_PLATFORMS=cpu python benchmarks/plan_accuracy.py > TABLE.md

With --compile the named cases (default: all that have no result yet) are compiled for their topology, a minute or two each, and
the compiler's figures are saved in benchmarks/plan_accuracy.json. Without it that file is compared with the current plan. No
TPU and no weights are needed. Figures are bytes per device: all arrays on the device while the program runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import jax
from common import run_main

from jaxalign.config import from_config_dict
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner import estimate, search, shapes
from jaxalign.planner.compiled import run_programs
from jaxalign.planner.hardware import tpu_cluster
from jaxalign.planner.programs import device_bytes
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.train import read_values

KEPT = Path(__file__).with_suffix(".json")
REAL = "configs/real_size.py"
FULL = ("--config.lora.rank=0", "--config.lora.base=float32")


@dataclasses.dataclass(frozen=True)
class Case:
    """config: file and variant; flags: command-line flags; programs: "stage phase" as in the plan."""

    config: str
    shape: str
    topology: str
    flags: tuple[str, ...]
    programs: tuple[str, ...]


def mesh(**sizes) -> tuple[str, ...]:
    sizes = dict(data=1, fsdp=1, tensor=1) | sizes
    return flags(**{f"mesh__{name}": size for name, size in sizes.items()})


def flags(**values) -> tuple[str, ...]:
    """Return flags --config.FIELD=VALUE; __ in a name stands for a dot."""
    return tuple(f"--config.{name.replace('__', '.')}={value}" for name, value in values.items())


PLAIN = flags(model__attention="plain")
CASES = {
    "06b-one": Case(f"{REAL}:qwen3_0_6b", "Qwen3-0.6B", "v5e:1x1", (), ("ppo generate", "ppo update")),
    "1b-one": Case(f"{REAL}:llama32_1b", "Llama-3.2-1B", "v5e:1x1", (), ("ppo generate", "ppo update")),
    "1b-fsdp4-plain": Case(
        f"{REAL}:llama32_1b", "Llama-3.2-1B", "v5e:2x2",
        (*FULL, *PLAIN, *mesh(fsdp=4), *flags(preference__micro_batch_tokens=1536, ppo__micro_batch_tokens=768)),
        ("sft update", "preference update", "ppo score"),
    ),
    "1b-fsdp4": Case(
        f"{REAL}:llama32_1b", "Llama-3.2-1B", "v5e:2x2",
        (*FULL, *mesh(fsdp=4), *flags(preference__micro_batch_tokens=1536, ppo__micro_batch_tokens=768)),
        ("sft update", "ppo score", "preference update"),
    ),
    "8b-fsdp16": Case(
        f"{REAL}:llama31_8b_v5e16", "Llama-3.1-8B", "v5e:4x4",
        (*mesh(fsdp=16), *flags(mesh__generation="training", sft__batch_rows=16, preference__micro_batch_tokens=1536)),
        ("ppo generate", "ppo score", "ppo update"),
    ),
    "8b-data4-tensor4": Case(
        f"{REAL}:llama31_8b_v5e16", "Llama-3.1-8B", "v5e:4x4", mesh(data=4, tensor=4), ("ppo generate", "sft update")
    ),
    "06b-no-remat": Case(
        f"{REAL}:qwen3_0_6b", "Qwen3-0.6B", "v6e:2x2",
        (*FULL, *mesh(data=2, fsdp=2), *flags(model__remat=False, preference__micro_batch_tokens=1536)),
        ("sft update",),
    ),
    "1b-zero1": Case(
        f"{REAL}:llama32_1b", "Llama-3.2-1B", "v5e:2x4",
        (*FULL, *mesh(fsdp=8), *flags(mesh__zero=1, sft__batch_rows=8, preference__micro_batch_tokens=1536)),
        ("sft update",),
    ),
    "8b-full-fsdp8-tensor2": Case(
        f"{REAL}:llama31_8b_h100x8", "Llama-3.1-8B", "v5p:2x2x4",
        (*mesh(fsdp=8, tensor=2), *flags(model__remat_saves="nothing")), ("sft update", "ppo generate"),
    ),
    "9b-fsdp2-tensor4": Case(f"{REAL}:gemma2_9b", "gemma-2-9b", "v5e:2x4", (), ("preference update",)),
    "1b-context2": Case(
        f"{REAL}:llama32_1b", "Llama-3.2-1B", "v5e:2x4",
        (*FULL, *mesh(fsdp=4, context=2), *flags(preference__micro_batch_tokens=1536, ppo__micro_batch_tokens=768)),
        ("sft update",),
    ),
    "70b-fsdp8-tensor8": Case(f"{REAL}:llama31_70b_v5p128", "Llama-3.1-70B", "v5p:4x4x4", (), ("ppo generate", "ppo update")),
    "8b-nf4-fsdp16": Case(
        f"{REAL}:llama31_8b_v5e16", "Llama-3.1-8B", "v5e:4x4",
        (*mesh(fsdp=16), *flags(mesh__generation="training", lora__base="nf4", sft__batch_rows=16),
         *flags(preference__micro_batch_tokens=1536)),
        ("sft update",),
    ),
}
PHASES = {"generate": "sampling", "score": "scoring", "reward": "reward", "update": "update"}


def given(case: Case) -> search.Given:
    values, _, _ = read_values(["plan_accuracy", f"--config={case.config}", *case.flags])
    values.model.path = values.data.train = "not read by a plan"
    config = from_config_dict(values)
    cluster = tpu_cluster(parse_topology(case.topology, config.mesh.slices))
    policy = shapes.policy_model(config, estimate.abstract_sharding(config.mesh), case.shape)
    return search.Given(config, policy, cluster)


def total(program, memory) -> int:
    """Return the bytes on a device while a program runs: its arguments and other live arrays, each once, its temporaries and
    its code."""
    known = jax.tree.leaves((program.arguments, dict(program.held)))
    arrays = [leaf for leaf in known if isinstance(leaf, jax.ShapeDtypeStruct)]
    leaves = [leaf for leaf in arrays if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    lying = device_bytes(list({id(leaf): leaf for leaf in leaves}.values()))
    return lying + own + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def compile_case(name: str, known: Collection[str]) -> Iterator[tuple[str, dict]]:
    """Yield (program, the compiler's figures) of the programs of a case without saved results."""
    case = CASES[name]
    plan, topology = given(case), parse_topology(case.topology)
    sizes = plan.config.mesh
    needed = sizes.data * sizes.fsdp * sizes.tensor * sizes.context * sizes.pipeline
    policy = shapes.policy_model(plan.config, make_sharding(sizes, topology_devices(topology, needed)), case.shape)
    for program in run_programs(plan.config, policy):
        wanted = f"{program.stage} {_phase(program.phase)}"
        if wanted not in case.programs or wanted in known:
            continue
        began = time.perf_counter()
        memory = program.step.lower(*program.arguments).compile().memory_analysis()
        seconds = round(time.perf_counter() - began)
        print(f"{name} {wanted}: {seconds} s", file=sys.stderr, flush=True)
        yield wanted, {"total": total(program, memory), "temporary": memory.temp_size_in_bytes, "seconds": seconds}


def _phase(phase: str) -> str | None:
    return next((ours for ours, theirs in PHASES.items() if theirs == phase), None)


def table(kept: dict) -> str:
    """Format one markdown line per program."""
    versions = kept["versions"]
    lines = [
        f"`libtpu` {versions['libtpu']}, `jax` {versions['jax']}.", "",
        "| model | mesh | topology | weights | program | plan, GB | compiler, GB | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        if name not in kept["cases"]:
            continue
        plan = given(case)
        run = plan.estimate()
        config = plan.config
        weights = "all" if not config.lora.rank else f"LoRA, {config.lora.base} base"
        weights += "" if config.model.remat else ", no remat"
        weights += ", plain attention" if config.model.attention == "plain" else ""
        for program, said in kept["cases"][name].items():
            task = next(task for task in run.tasks if task.task.name == program)
            lines.append(
                f"| {case.shape} | {search.mesh_words(config.mesh)} | {case.topology} | {weights} | {program} | "
                f"{task.peak / 1e9:.2f} | {said['total'] / 1e9:.2f} | {task.peak / said['total'] - 1:+.1%} |"
            )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the named cases, or all without saved results")
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="cases to compile")
    args = parser.parse_args(argv)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"cases": {}}
    if args.compile:
        kept["versions"] = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
        for name in args.names or CASES:
            known = kept["cases"].setdefault(name, {})
            for program, said in compile_case(name, known):
                known[program] = said
                KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(kept))
    return 0


if __name__ == "__main__":
    run_main(main)
