"""The entry point `python -m jaxalign.plan`: reports whether a run fits, how long it takes and what it costs (docs/plan.md).

Exit codes: 0 it fits, 1 it does not, 2 a user error (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxalign import train
from jaxalign.commands import run_command
from jaxalign.config import Config, from_config_dict, reset_unread
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import DATA_SOURCES

if TYPE_CHECKING:
    from jaxalign.planner.estimate import RunEstimate
    from jaxalign.planner.placement_choices import Choices

_USAGE = """usage: python -m jaxalign.plan --config=FILE --topology=NAME [--config.FIELD=VALUE ...]

Prints the memory, work and time of each task of a run, by arithmetic, for devices that need not be attached.

  --config=FILE         a config file as for jaxalign.train, with any --config.FIELD=VALUE
  --topology=NAME       TPUs: a generation (v4, v5e, v5p, v6e) and the chips along each axis, as in v5p:4x4x8
                        GPUs: a kind (a100, h100, h200, b200, gb200) or a description file, hosts x GPUs, as in h100:4x8
  --gpus=NAMExCOUNT     other GPUs, or without --compile, as in H100x8
  --shape=NAME          the architecture of a published model, as in Llama-3.1-8B, without its files
  --search              plan the fastest mesh that fits instead of config.mesh, and list placements of stage ppo
  --write-config=FILE   with --search: write a config file that runs the config with the fastest mesh and placement that fit
  --compile             also compile every step for the topology (minutes; pip install 'jaxalign[aot]' or, for GPUs, [aot-cuda])
  --prompt=N            tokens of the longest prompt; default: model.max_length minus the new tokens
  --examples=N          rows of the data file, which determine the number of steps
  --prices=FILE         JSON with prices and their date, as in configs/prices_example.json
  --mfu=SHARE           share of peak FLOP/s that matrix products reach; default 0.5
  --hbm=SHARE           share of peak memory bandwidth that programs reach; default 0.8
  --network=SHARE       share of peak network bandwidth that programs reach; default 0.8
  --json                print one JSON object

Exit codes: 0 it fits, 1 it does not, 2 a mistake in the arguments.
"""
_VALUES = ("topology", "gpus", "shape", "prompt", "examples", "prices", "mfu", "hbm", "network", "write-config")
_SWITCHES = ("search", "compile", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit code. `argv` includes the program's name; default sys.argv."""
    return run_command(argv, _USAGE, _run)


def _run(argv: list[str]) -> int:
    own, rest = _take_own(argv[1:])
    if own["write-config"]:
        if not own["search"]:
            raise UserError("--write-config needs --search, which finds the mesh and the placement to write; add --search")
        from jaxalign.planner.config_file import require_new

        require_new(own["write-config"])
    return _plan(read_config([argv[0], *rest], own["shape"]), own, rest)


def read_config(argv: Sequence[str], shape: str) -> Config:
    """The checked config. Paths of files that a plan does not read may be unset: the data's and, with `shape`, the model's. A
    shape replaces the sizes of the config's own model."""
    values, _, _ = train.read_values(argv)
    if isinstance(values.data.source, str):
        record, unread = DATA_SOURCES.get(values.data.source, "config.data.source"), "not read by a plan"
        if record.rows and not (values.data.train or values.data.rl):
            values.data.train = unread
        if record.reads and "red_team" in record.reads:
            values.data.red_team = values.data.red_team or unread
    if shape:
        values.model.source, values.model.path = "huggingface", values.model.path or shape
        reset_unread(values, "model.source")
    return from_config_dict(values)


def _plan(config: Config, own: dict[str, Any], arguments: Sequence[str]) -> int:
    """Prints the plan. arguments: those of the config, which `jaxalign.train` reads."""
    # Imported here so that a mistyped flag is reported without importing JAX.
    from jaxalign.planner import compiled_report, placement_choices, placement_report, report, search, shapes
    from jaxalign.planner.estimate import Assumptions, abstract_sharding, role_weights
    from jaxalign.planner.hardware import gpu_cluster, topology_cluster
    from jaxalign.planner.prices import read_prices
    from jaxalign.planner.requests import planned_requests
    from jaxalign.planner.topology import parse_topology

    if bool(own["topology"]) == bool(own["gpus"]):
        raise UserError("exactly one of --topology (as in v5e:4x4 or h100:1x8) and --gpus (as in L4x8) is expected")
    topology = parse_topology(own["topology"], config.mesh.slices) if own["topology"] else None
    cluster = gpu_cluster(own["gpus"]) if topology is None else topology_cluster(topology)
    prices = read_prices(own["prices"]) if own["prices"] else None
    assumptions = Assumptions(own["mfu"], own["hbm"], own["network"])
    policy = shapes.policy_model(config, abstract_sharding(config.mesh), own["shape"] or None)
    given = search.Given(config, policy, cluster, assumptions, own["prompt"], own["examples"])
    if config.placement.strategy != "flat":
        given.estimate()  # Raises the sentence on the placement.
    best, placements = search.possible(given), None
    if own["search"]:
        if not best:
            raise UserError(f"no mesh of all {cluster.devices} devices of {cluster.name} divides this model and its batches; "
                            "choose batch sizes that more meshes divide, or another topology")
        placements = placement_choices.placement_choices(given)
        given = dataclasses.replace(given, config=best[0].config)
    run = given.estimate()
    sharded = dataclasses.replace(policy, sharding=abstract_sharding(given.config.mesh))
    roles = dict.fromkeys(role for task in run.tasks for role in task.task.stays)
    weights = {role: role_weights(config, sharded, role)[1] for role in roles}
    advice = [] if run.fits else search.advice(given)
    # The fastest mesh that fits is worth a line if it saves at least 5% of the time.
    saves = best and best[0].fits and not (run.fits and best[0].seconds > 0.95 * run.seconds)
    faster = best[0] if saves else None
    compiled = _compiled(given.config, own) if own["compile"] else []
    requests = planned_requests(config, own["prompt"])
    if own["json"]:
        content = report.to_json(run, weights, assumptions, prices)
        content["advice"] = [{"change": words, "peak_bytes": other.peak, "seconds": other.seconds} for words, other in advice]
        content["faster_mesh"] = None if faster is None else search.mesh_words(faster.config.mesh)
        content["requests"] = [dataclasses.asdict(each) for each in requests]
        content["compiled"] = compiled_report.to_json(compiled)
        content["placements"] = placement_report.to_json(placements, cluster, prices)
        print(json.dumps(content, indent=1))
    else:
        print(report.text(run, weights, own["shape"] or config.model.path or "The model", assumptions, prices))
        print(report.verdict(run))
        if faster is not None:
            print(f"A faster mesh that fits: {search.mesh_words(faster.config.mesh)} ({faster.seconds / 3600:.3g} hours, peak "
                  f"{faster.peak / report.GB:.1f} GB); --search plans it.")
        for line in (*([] if run.fits else report.advised(advice)), *placement_report.lines(placements, cluster, prices),
                     *report.request_lines(requests, config.endpoint)):
            print(line)
        if compiled:
            print("\n" + compiled_report.text(compiled))
    if own["write-config"]:
        _write_config(own["write-config"], arguments, config, run, placements)
    return 0 if run.fits and all(program.fits for program in compiled) else 1


def _write_config(path: str, arguments: Sequence[str], config: Config, run: RunEstimate, placements: Choices | None) -> None:
    """Writes the config with the fastest placement that fits, else with the plan's mesh, and says on stderr what it wrote.

    config: the config of the arguments. run: its plan with the fastest mesh.
    """
    from jaxalign.planner.config_file import write_config
    from jaxalign.planner.placement_choices import changes

    if placements is not None and placements.best:
        flags = placements.best[0].flags
    elif run.fits:
        flags = changes(config, run.config)
    else:
        print(f"{path} is not written, because no mesh fits", file=sys.stderr)
        return
    write_config(path, "A config with the fastest mesh and placement that fit " + run.cluster.name + ".", [*arguments, *flags])
    print(f"wrote {path}, for python -m jaxalign.train --config={path}", file=sys.stderr)


def _compiled(config: Config, own: dict[str, Any]):
    """Compiles every step of the run for the topology. Raises UserError without a topology."""
    from jaxalign.parallel.compile_cache import cache_folder
    from jaxalign.parallel.sharding import make_sharding
    from jaxalign.planner import shapes
    from jaxalign.planner.compiled import compile_run
    from jaxalign.planner.compiled_report import verdict
    from jaxalign.planner.topology import parse_topology, topology_devices

    if not own["topology"]:
        raise UserError("--compile needs a --topology, as in v5e:4x4 or, in place of --gpus, h100:1x8")
    mesh, topology = config.mesh, parse_topology(own["topology"], config.mesh.slices)
    devices = topology_devices(topology, mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.pipeline)
    policy = shapes.policy_model(config, make_sharding(mesh, devices), own["shape"] or None)
    cache = None if config.compile_cache is None else cache_folder(config.compile_cache)
    reports = None if cache is None or "://" in cache else pathlib.Path(cache) / "plans"
    return compile_run(config, policy, prompt=own["prompt"], usable=topology.usable,
                       progress=lambda program: sys.stderr.write(verdict(program) + "\n"),
                       reports=reports, topology=json.dumps(dataclasses.asdict(topology)))


def _take_own(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """This command's flags, and the remaining arguments, which `train` parses.

    Raises:
        UserError: a flag has no value, or an invalid one.
    """
    options, rest = train.take_options(arguments, _VALUES, _SWITCHES)
    own: dict[str, Any] = dict.fromkeys(_VALUES, "") | dict.fromkeys(_SWITCHES, False) | options
    for name in ("prompt", "examples"):
        if own[name] and (not own[name].isdecimal() or not int(own[name])):
            raise UserError(f"--{name} is {own[name]!r}; a number of at least 1 is expected")
        own[name] = int(own[name]) if own[name] else None
    for name, usual in (("mfu", 0.5), ("hbm", 0.8), ("network", 0.8)):
        own[name] = _share(name, own[name]) if own[name] else usual
    return own, rest


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(f"--{name} is {text!r}; a share above 0 and at most 1 is expected")
    return share


if __name__ == "__main__":
    sys.exit(main())
