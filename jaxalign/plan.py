"""The entry point `python -m jaxalign.plan`: reports whether a run fits, how long it takes and what it costs (docs/plan.md).

Exit codes: 0 it fits, 1 it does not, 2 a user error (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import functools
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
    from jaxalign.planner.compiled import CompiledProgram
    from jaxalign.planner.estimate import RunEstimate
    from jaxalign.planner.micro_batches import AutoChoices
    from jaxalign.planner.placement_choices import Choice, Choices
    from jaxalign.planner.placement_kinds import KindChoices
    from jaxalign.planner.prices import DevicePrices
    from jaxalign.planner.search import Given
    from jaxalign.planner.topology import RoleTopology
    from jaxalign.planner.weights import WeightBytes

_USAGE = """usage: python -m jaxalign.plan --config=FILE --topology=NAME [--config.FIELD=VALUE ...]

Prints the memory, work and time of each task of a run, by arithmetic, for devices that need not be attached.

  --config=FILE         a config file as for jaxalign.train, with any --config.FIELD=VALUE
  --topology=NAME       TPUs: a generation (v4, v5e, v5p, v6e) and the chips along each axis, as in v5p:4x4x8
                        GPUs: a kind (a100, h100, h200, b200, gb200) or a description file, hosts x GPUs, as in h100:4x8
                        for groups of roles (docs/placement.md): policy+critic=v5p:2x2x4,generator+reference=v5e:2x4
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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is printed.

    Attributes:
      given: the inputs, with the fastest mesh if the plan searched it.
      run: the estimate.
      prices: the prices; None without --prices.
      faster: a faster mesh that fits; None without one.
      placements: the placements of a search on one machine; kinds: those of a search on several.
      compiled: the compiled programs.
      auto: what strategy auto would choose.
      chosen: what "auto" chooses for the sizes of micro-batches and for `mesh.keep_gathered`.
    """

    given: Given
    run: RunEstimate
    prices: DevicePrices | None
    faster: RunEstimate | None
    placements: Choices | None
    kinds: KindChoices | None
    compiled: Sequence[CompiledProgram]
    auto: tuple[str, ...]
    chosen: AutoChoices

    @functools.cached_property
    def advice(self) -> list[tuple[str, RunEstimate]]:
        """Changes with which a run without a placement fits."""
        from jaxalign.planner import search

        return [] if self.run.fits or self.run.placed else search.advice(self.given)

    @functools.cached_property
    def less_recomputation(self) -> tuple[str, RunEstimate] | None:
        """A change with which a run without a placement recomputes less, and its plan; None if none is worth it."""
        from jaxalign.planner import search

        return None if self.run.placed else search.less_recomputation(self.given, self.run)

    @functools.cached_property
    def weights(self) -> dict[str, WeightBytes]:
        """Those of each role on config.mesh."""
        from jaxalign.planner.estimate import abstract_sharding, role_weights

        policy = self.given.policy.on(abstract_sharding(self.given.config.mesh))
        roles = dict.fromkeys(role for task in self.run.tasks for role in task.task.stays)
        return {role: role_weights(self.given.config, policy, role)[1] for role in roles}

    @property
    def choice(self) -> Choice | None:
        """The fastest placement that one program can run; None without a search or a placement."""
        if self.kinds is not None:
            return self.kinds.fastest_program and self.kinds.fastest_program.choice
        return self.placements.best[0] if self.placements is not None and self.placements.best else None


def _plan(config: Config, own: dict[str, Any], arguments: Sequence[str]) -> int:
    """Prints the plan. arguments: those of the config, which `jaxalign.train` reads."""
    # Imported here so that a mistyped flag is reported without importing JAX.
    from jaxalign.config.sections.shared import AUTO
    from jaxalign.planner import placement_choices, placement_kinds, search
    from jaxalign.planner.micro_batches import AutoChoices, with_defaults, with_kept
    from jaxalign.planner.prices import read_prices

    given, groups, auto = _given(config, own)
    config, cluster = given.config, given.cluster
    prices = read_prices(own["prices"]) if own["prices"] else None
    flat, chosen = config.placement.strategy == "flat", AutoChoices()
    best, placements, kinds = search.possible(given) if flat else (), None, None
    if not own["search"]:
        given, chosen = given.resolved()
    if own["search"]:
        if not best:
            raise UserError(f"no mesh of all {cluster.devices} devices of {cluster.name} divides this model and its batches; "
                            "choose batch sizes that more meshes divide, or another topology")
        # A placement has a size of its own. It cannot keep weights gathered; `refusal` reports that.
        usual = dataclasses.replace(given, config=with_kept(with_defaults(config), config.mesh.keep_gathered))
        if given.others:
            kinds = placement_kinds.kind_choices(usual, prices)
        else:
            placements = placement_choices.placement_choices(usual)
        mesh = best[0].config.mesh
        if mesh.fsdp > 1:
            mesh = dataclasses.replace(mesh, keep_gathered=config.mesh.keep_gathered)
        given, chosen = dataclasses.replace(given, config=dataclasses.replace(config, mesh=mesh)).resolved()
    run = given.estimate() if flat else _placed(given, groups)
    # The fastest mesh that fits is worth a line if it saves at least 5% of the time.
    saves = best and best[0].fits and not (run.fits and best[0].seconds > 0.95 * run.seconds)
    compiled = _compiled(given, groups) if own["compile"] else []
    plan = _Plan(given, run, prices, best[0] if saves else None, placements, kinds, compiled, auto, chosen)
    print(json.dumps(_json(plan), indent=1) if own["json"] else _text(plan, own["shape"] or config.model.path or "The model"))
    if own["write-config"]:
        # Auto is planned as flat here, and the flags change flat.
        changed = [*arguments, *(["--config.placement.strategy=flat"] if auto else [])]
        # A placement is planned with the default sizes in the other stages, and its flags have that of ppo.
        changed += [f"--config.{size.section}.micro_batch_tokens={0 if plan.choice else size.tokens}" for size in chosen.sizes]
        if config.mesh.keep_gathered == AUTO:
            changed.append(f"--config.mesh.keep_gathered={'never' if chosen.kept is None else chosen.kept.value}")
        program = None if kinds is None else kinds.fastest_program
        machine = cluster.name if program is None else program.machines[0]
        _write_config(own["write-config"], changed, config, run, plan.choice, machine)
    return 0 if run.fits and all(program.fits for program in compiled) else 1


def _json(plan: _Plan) -> dict[str, Any]:
    """All numbers of the plan, unrounded."""
    from jaxalign.planner import compiled_report, placement_report, report, search
    from jaxalign.planner.requests import planned_requests

    given, less = plan.given, plan.less_recomputation
    return report.to_json(plan.run, plan.weights, given.assumptions, plan.prices) | {
        "advice": [_change(*change) for change in plan.advice],
        "less_recomputation": None if less is None else _change(*less),
        "faster_mesh": None if plan.faster is None else search.mesh_words(plan.faster.config.mesh),
        "micro_batches": [dataclasses.asdict(size) for size in plan.chosen.sizes],
        "keep_gathered": None if plan.chosen.kept is None else dataclasses.asdict(plan.chosen.kept),
        "requests": [dataclasses.asdict(each) for each in planned_requests(given.config, given.prompt)],
        "compiled": compiled_report.to_json(plan.compiled),
        "placements": placement_report.to_json(plan.placements, given.cluster, plan.prices),
        "kinds": placement_report.kinds_to_json(plan.kinds),
    }


def _change(words: str, run: RunEstimate) -> dict[str, Any]:
    return {"change": words, "peak_bytes": run.peak, "seconds": run.seconds}


def _text(plan: _Plan, name: str) -> str:
    """The tables of the plan, its verdict and what follows from it. name: the model's."""
    from jaxalign.planner import compiled_report, placement_report, report, search
    from jaxalign.planner.requests import planned_requests

    given, run, faster = plan.given, plan.run, plan.faster
    lines = [report.text(run, plan.weights, name, given.assumptions, plan.prices), report.verdict(run)]
    if faster is not None:
        mesh = search.mesh_words(faster.config.mesh)
        lines.append(f"A faster mesh that fits: {mesh} {report.figures(faster)}; --search plans it.")
    if plan.less_recomputation is not None:
        words, less = plan.less_recomputation
        lines.append(f"Less recomputation fits too: {words} {report.figures(less)}.")
    lines += [f"config.placement.strategy=auto would choose {sentence}." for sentence in plan.auto]
    lines += [f"{sentence}." for sentence in plan.chosen.sentences]
    lines += [] if run.fits or run.placed else report.advised(plan.advice)
    lines += placement_report.lines(plan.placements, given.cluster, plan.prices)
    lines += placement_report.kind_lines(plan.kinds, plan.prices)
    lines += report.request_lines(planned_requests(given.config, given.prompt), given.config.endpoint)
    return "\n".join(lines + (["\n" + compiled_report.text(plan.compiled)] if plan.compiled else []))


def _given(config: Config, own: dict[str, Any]) -> tuple[Given, list[RoleTopology], tuple[str, ...]]:
    """(the inputs of the plan, the topologies by role, what strategy auto would choose). Auto is replaced by its choice, or by
    flat for a search, which lists what auto chooses from."""
    from jaxalign.planner import placement_auto, shapes
    from jaxalign.planner.estimate import Assumptions, abstract_sharding
    from jaxalign.planner.hardware import gpu_cluster, topology_cluster
    from jaxalign.planner.search import Given
    from jaxalign.planner.topology import parse_topologies, require_placement

    if bool(own["topology"]) == bool(own["gpus"]):
        raise UserError("exactly one of --topology (as in v5e:4x4 or h100:1x8) and --gpus (as in L4x8) is expected")
    groups = parse_topologies(own["topology"], config.mesh.slices) if own["topology"] else []
    cluster, *others = [topology_cluster(topology) for _, topology in groups] or map(gpu_cluster, own["gpus"].split(","))
    assumptions, strategy = Assumptions(own["mfu"], own["hbm"], own["network"]), config.placement.strategy
    if groups:
        require_placement(groups, strategy)
    if others and strategy in ("flat", "auto") and not own["search"]:
        raise UserError(f"several machines are given, but config.placement.strategy is {strategy}; add --search to compare "
                        "placements on them, or set the strategy to separate or custom")
    if own["search"] and strategy not in ("flat", "auto"):
        raise UserError(f"config.placement.strategy is {strategy!r}, but --search compares placements itself; set it to flat, "
                        "or plan the placement without --search")
    policy = shapes.policy_model(config, abstract_sharding(config.mesh), own["shape"] or None)
    given = Given(config, policy, cluster, assumptions, own["prompt"], own["examples"], tuple(others))
    if strategy != "auto":
        return given, groups, ()
    chosen = placement_auto.AutoPlacement(sentences=("flat, for stages other than ppo",))
    if own["search"]:
        chosen = placement_auto.AutoPlacement(sentences=("the first of these placements if it is clearly faster than flat",))
    elif "ppo" in config.stages:
        chosen = placement_auto.choose(given)
    placement = dataclasses.replace(config.placement, strategy="custom" if chosen.roles else "flat", roles=chosen.roles)
    return dataclasses.replace(given, config=dataclasses.replace(config, placement=placement)), groups, chosen.sentences


def _placed(given: Given, groups: Sequence[RoleTopology]) -> RunEstimate:
    """The plan of a config with a placement."""
    from jaxalign.planner.placed_estimate import check_groups, estimate_placed

    run = estimate_placed(given)
    for stage in run.placed:
        check_groups(stage.placement, [(roles, cluster) for (roles, _), cluster in zip(groups, run.clusters, strict=False)])
    return run


def _write_config(
    path: str, arguments: Sequence[str], config: Config, run: RunEstimate, choice: Choice | None, machine: str
) -> None:
    """Writes the config with the fastest placement that fits, else with the plan's mesh, and says on stderr what it wrote.

    config: the config of the arguments. run: its plan with the fastest mesh. choice: the fastest placement that one program can
    run; None without one. machine: the name of its devices.
    """
    from jaxalign.planner.config_file import write_config
    from jaxalign.planner.placement_choices import changes

    if choice is not None:
        flags = choice.flags
    elif run.fits:
        flags = changes(config, run.config)
    else:
        print(f"{path} is not written, because no mesh fits", file=sys.stderr)
        return
    write_config(path, f"A config with the fastest mesh and placement that fit {machine}.", [*arguments, *flags])
    print(f"wrote {path}, for python -m jaxalign.train --config={path}", file=sys.stderr)


def _compiled(given: Given, groups: Sequence[RoleTopology]):
    """Compiles every step of the run for the topologies. Raises UserError without one."""
    from jaxalign.parallel.compile_cache import cache_folder
    from jaxalign.parallel.precision import use_matmul_precision
    from jaxalign.planner.compiled_placed import compile_for
    from jaxalign.planner.compiled_report import verdict

    if not groups:
        raise UserError("--compile needs a --topology, as in v5e:4x4 or, in place of --gpus, h100:1x8")
    use_matmul_precision(given.config.model.matmul_precision)
    kept = given.config.compile_cache
    cache = None if kept is None else cache_folder(kept)
    reports = None if cache is None or "://" in cache else pathlib.Path(cache) / "plans"
    return compile_for(given, [topology for _, topology in groups], reports=reports,
                       progress=lambda program: sys.stderr.write(verdict(program) + "\n"))


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
