"""Chooses placements of stage ppo for a run on one host: those of `placement_schedules` that this project can run.

The models and the rows are those of the run's plan. A placement is kept if `placement.resolve` accepts its entries, the config
accepts its fields, and it samples the whole batch at once, as the run does. All roles have one `ppo.micro_batch_tokens`, unlike
in the search, which cuts each task into parts of its own; the times and the memory are computed again for the value that is
chosen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxalign.config import Config, check, schema
from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.meshes import Limits
from jaxalign.placement.resolve import resolve
from jaxalign.planner.estimate import RunEstimate, optimizer_kind
from jaxalign.planner.micro_batches import ALIKE
from jaxalign.planner.placement_parts import in_parts, samples_at_once
from jaxalign.planner.placement_schedules import FLAT, search_schedules
from jaxalign.planner.placement_search import Devices, Found, Problem
from jaxalign.planner.placement_sets import PlacedSet
from jaxalign.planner.role_models import ExecutionModel, RoleModel, Workload
from jaxalign.planner.search import Given, possible
from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.scorer import student_model
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.placing import limits_of
from jaxalign.rl.state import values_in_update


@dataclasses.dataclass(frozen=True)
class Choice:
    """A placement that the run can use.

    Attributes:
      found: the placement, with the tasks as they run with the config's micro-batches.
      config: the run's config with the placement, the mesh of the other stages and the micro-batches.
      flags: the arguments of `jaxalign.train` that turn the given config into this one.
      idle: the share of an iteration in which a device of the machine is idle, the mean over the devices.
    """

    found: Found
    config: Config
    flags: tuple[str, ...]
    idle: float

    @property
    def peak(self) -> float:
        """Bytes on the device that needs the most."""
        return max(group.peak for group in self.found.sets)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The placements of stage ppo.

    Attributes:
      best: the placements, the fastest first.
      refused: a sentence that says why there are none; empty if there are some.
      workload: the rows of an iteration; None if no placement was searched.
      notes: sentences that say what the figures do not include.
    """

    best: tuple[Choice, ...] = ()
    refused: str = ""
    workload: Workload | None = None
    notes: tuple[str, ...] = ()


def placement_choices(given: Given, keep: int = 4) -> Choices | None:
    """The fastest placements of stage ppo that fit, among them one with all roles together if it fits; None without ppo.

    given: the inputs of the plan, with the config that the flags of a choice change.
    """
    if "ppo" not in given.config.stages:
        return None
    refused = refusal(given)
    base = None if refused else mesh_of_other_stages(given)
    if base is None:
        return Choices(refused=refused or f"no mesh of {given.cluster.name} with mesh.generation=tensor fits the stages other "
                       "than ppo; choose a larger machine, or smaller batches for them")
    problem = problem_of(given, base)
    try:
        every = search_schedules(problem)
    except UserError as error:
        return Choices(refused=str(error), workload=problem.workload)
    chosen = [choice for found in every if (choice := _choice(given, base, problem, found)) is not None]
    if not chosen:
        return Choices(refused=f"no placement that this project runs fits on {given.cluster.name} with all "
                       f"{problem.workload.batch} responses sampled at once; choose more devices, or a smaller model or "
                       "config.ppo.batch", workload=problem.workload)
    fastest = min(choice.found.seconds for choice in chosen)
    # Of those as fast as the best one, the one with the fewest sets is first.
    chosen.sort(key=lambda choice: (max(choice.found.seconds, ALIKE * fastest), len(choice.found.sets), choice.found.seconds))
    best = chosen[:keep]
    together = next((choice for choice in chosen if choice.found.schedule == FLAT), None)
    if together is not None and together not in best:
        best[-1] = together
    return Choices(tuple(best), "", problem.workload, notes_on(given, problem))


def refusal(given: Given) -> str:
    """Why placements other than flat cannot run or are not modelled; empty if they can."""
    config, cluster = given.config, given.cluster
    if cluster.hosts > 1 or cluster.slices > 1:
        return (f"{cluster.name} has {cluster.hosts} hosts, each with a process of its own, and several processes run only "
                "strategy flat; plan one host to compare placements")
    if cluster.devices == 1:
        return "one device has only strategy flat"
    if config.mesh.offload:
        return (f"config.mesh.offload is {config.mesh.offload}, which works with strategy flat only; leave it empty to compare "
                "placements")
    if config.mesh.keep_gathered != "never":
        return (f"config.mesh.keep_gathered is {config.mesh.keep_gathered!r}, which works with strategy flat only; set it to "
                "'never' to compare placements")
    if config.sampler != "local":
        return f"config.sampler is {config.sampler!r}, and the search models only sampling on the devices of the run"
    records = reward_records(config.reward.source)
    models = [record.name for record in records if record.is_model or record.asks_judge]
    unlike = [record.name for record in records if record.name in models and not record.learnt] or models[1:]
    if unlike:
        return (f"config.reward.source has {' and '.join(unlike)}, and the search models the reward of one preference model or "
                "student of this run only")
    return ""


def mesh_of_other_stages(given: Given) -> RunEstimate | None:
    """The best plan with mesh.generation "tensor" in which all stages other than ppo fit; None if there is none."""
    for run in possible(given):
        others = [task.peak for task in run.tasks if task.task.stage != "ppo"]
        if run.config.mesh.generation == "tensor" and max(others, default=0.0) <= given.cluster.usable:
            return run
    return None


def problem_of(given: Given, base: RunEstimate) -> Problem:
    """The roles and the rows of the plan's tasks of stage ppo."""
    config, policy, mesh = given.config, given.policy, base.config.mesh
    tasks = {each.task.phase: each.task for each in base.tasks if each.task.stage == "ppo"}
    stored = "float32" if policy.lora is None else config.lora.base
    roles = [RoleModel(role, policy.with_head("scalar" if role == "critic" else "lm"),
                       optimizer=optimizer_kind(config, "ppo", role)) for role in tasks["update"].trains]
    roles.append(RoleModel("reference", policy, stored))
    learnt = [record.name for record in reward_records(config.reward.source) if record.learnt]
    if "distilled" in learnt:
        roles.append(RoleModel("reward", student_model(config.reward_distill, policy), "float32"))
    elif learnt:
        model = policy.with_head("scalar")
        deeper = dataclasses.replace(model.config, layers=model.config.layers * config.preference.members)
        roles.append(RoleModel("reward", dataclasses.replace(model, config=deeper), stored))
    rows = tasks["generate"].rows
    workload = Workload(rows.length, rows.new, rows.rows, config.ppo.minibatches, config.ppo.epochs,
                        "policy" in tasks["score"].runs, values_in_update(config.ppo))
    engine = ExecutionModel(given.assumptions, zero=mesh.zero, sequence_parallel=mesh.sequence_parallel)
    return Problem(tuple(roles), (Devices(given.cluster.chip, given.cluster.devices),), workload, engine)


def notes_on(given: Given, problem: Problem) -> tuple[str, ...]:
    """What the times and the memory of a choice do not include."""
    config = given.config
    notes = ["Not modelled: the other stages, the checks of step 0 except for their copy of the reference, and responses that "
             "end early."]
    if config.ppo.alarms.every:
        notes.append("The measurements of config.ppo.alarms are not counted.")
    if not any(role.role == "reward" for role in problem.roles) or len(reward_records(config.reward.source)) > 1:
        notes.append("The time of a reward on the host is not counted.")
    if any(record.learnt and record.name == "preference" for record in reward_records(config.reward.source)):
        if config.preference.members > 1:
            notes.append(f"The {config.preference.members} preference models count as one model with all their layers.")
    if given.policy.lora is not None:
        notes.append("Each role counts a frozen base of its own, although roles with the same mesh share one: memory is at "
                     "most as stated.")
    if estimator_of(config.ppo).needs_greedy:
        notes.append(f"The greedy responses of {config.ppo.advantages} are not counted.")
    return tuple(notes)


def _choice(given: Given, base: RunEstimate, problem: Problem, found: Found) -> Choice | None:
    """A placement as a config of the run; None if the run cannot use it."""
    for tokens, option in fitting_parts(given, problem, found):
        for config in _configs(base, option, tokens):
            if accepted(given, problem, config):
                return Choice(option, config, changes(given.config, config), idle_share(problem, option))
    return None


def fitting_parts(given: Given, problem: Problem, found: Found) -> list[tuple[int, Found]]:
    """(ppo.micro_batch_tokens, the placement with it) for each value that fits, the best first; empty if the run cannot sample
    the batch at once.

    The config's own value is first if it is as fast as the best one, else the smallest value that is as fast.
    """
    if not samples_at_once(found):
        return []
    length, own = problem.workload.prompt + problem.workload.new, given.config.ppo.micro_batch_tokens
    sizes = [length << power for power in range(problem.workload.batch.bit_length())] + [own] * (own >= length)
    options = {tokens: in_parts(found, tokens, problem) for tokens in sizes}
    fitting = {tokens: option for tokens, option in options.items() if all(group.peak <= group.usable for group in option.sets)}
    fastest = min((option.seconds for option in fitting.values()), default=0.0)

    def rank(tokens: int) -> tuple[bool, bool, float]:
        alike = fitting[tokens].seconds <= ALIKE * fastest
        return not alike, tokens != own, tokens if alike else fitting[tokens].seconds

    return [(tokens, fitting[tokens]) for tokens in sorted(fitting, key=rank)]


def _configs(base: RunEstimate, found: Found, tokens: int) -> Iterator[Config]:
    """The plan's config with a placement: with strategy flat if all roles have the mesh of the other stages, and custom."""
    config = dataclasses.replace(base.config, ppo=dataclasses.replace(base.config.ppo, micro_batch_tokens=tokens))
    wanted = {tuple(one.times.mesh.items()) for group in found.sets for one in group.members}
    if len(found.sets) == 1 and len(wanted) == 1:
        flat = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **dict(*wanted)))
        if flat == config or all(task.task.stage == "ppo" for task in base.tasks):
            yield flat
    roles = joined(found.entries)
    yield dataclasses.replace(config, placement=dataclasses.replace(config.placement, strategy="custom", roles=roles))


def joined(entries: Sequence[str]) -> tuple[str, ...]:
    """Entries of `placement.custom` with the roles of equal devices and meshes joined by +."""
    roles: dict[str, list[str]] = {}
    for entry in entries:
        role, _, where = entry.partition("=")
        roles.setdefault(where, []).append(role)
    return tuple(f"{'+'.join(names)}={where}" for where, names in roles.items())


def accepted(given: Given, problem: Problem, config: Config) -> bool:
    """Whether a run accepts a config with a placement; with strategy flat, also whether its own plan fits."""
    (devices,), limits = problem.devices, role_limits(problem)
    mesh = {axis: getattr(config.mesh, axis) for axis in meshes.AXES}
    machine = Machine((Host(devices.chip.name, devices.count),))
    try:
        check(config)
        if config.placement.strategy == FLAT:
            return dataclasses.replace(given, config=config).estimate().fits
        on = resolve("custom", tuple(limits), machine, mesh, custom=config.placement.roles, limits=limits).roles
    except UserError:
        return False
    policy, reference = on["policy"], on["reference"]
    together = config.ppo.kl_in == "loss" and (policy.devices, policy.mesh) == (reference.devices, reference.mesh)
    return config.ppo.kl_estimator != "full" or together


def role_limits(problem: Problem) -> dict[str, Limits]:
    """The sizes that the mesh of each role must divide."""
    workload = problem.workload
    return {role.role: limits_of(role.model, workload.batch // (workload.minibatches if role.trained else 1))
            for role in problem.roles}


def idle_share(problem: Problem, found: Found) -> float:
    """The share of an iteration in which a device is idle, the mean over all devices of the problem."""
    def busy(group: PlacedSet) -> float:
        return group.count * math.fsum(group.seconds)

    moving = (problem.count - found.unused) * found.moved
    return max(0.0, 1 - (math.fsum(map(busy, found.sets)) + moving) / (problem.count * found.seconds))


def changes(before: Config, after: Config) -> tuple[str, ...]:
    """The arguments of `jaxalign.train` that turn one config into another, in the order of the fields."""
    old, new = schema.flatten(before), schema.flatten(after)
    return tuple(f"--config.{name}={_value(value)}" for name, value in new.items() if value != old.get(name))


def _value(value: object) -> str:
    """A value on the command line. Entries with commas are strings of a Python tuple."""
    if not isinstance(value, tuple):
        return str(value)
    if not any("," in str(entry) for entry in value):
        return ",".join(map(str, value))
    return "({},)".format(", ".join(f'"{entry}"' for entry in value))
