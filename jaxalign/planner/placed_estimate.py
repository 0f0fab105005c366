"""Estimates the memory and the time of a stage with roles on devices of their own (`config.placement`).

The arithmetic of each task is that of `estimate`, on the mesh and the devices of its role. The order of the tasks is that of
`rl.placed`; an iteration takes as long as in a simulation of several of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jaxalign.config import Config, check, rounds
from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.placement.machine import Host, Machine
from jaxalign.placement.plan import Placement, RolePlacement
from jaxalign.placement.slices import DeviceSlice
from jaxalign.planner import memory
from jaxalign.planner.estimate import RunEstimate, TaskEstimate, TaskEstimator, check_divides, role_weights, with_attention
from jaxalign.planner.hardware import Cluster
from jaxalign.planner.placed_runs import PLACED_STAGES
from jaxalign.planner.placed_tasks import MODELS, Durations, PlacedTask, placed_tasks, seconds_of_iteration
from jaxalign.planner.role_models import part_of
from jaxalign.planner.role_times import moving_seconds
from jaxalign.planner.search import Given
from jaxalign.rl.placing import check_options, resolve_run
from jaxalign.rl.step_zero import checked_rows
from jaxalign.steps.packed import rows_split

STEP_ZERO = "checks of step 0"


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices with the same roles.

    Attributes:
      devices: the devices.
      cluster: the machine that they belong to.
      resident: bytes on each device during the whole stage, by role.
      temporary: bytes that a task adds, by task.
    """

    devices: DeviceSlice
    cluster: Cluster
    resident: Mapping[str, float]
    temporary: Mapping[str, float]

    @property
    def largest(self) -> str:
        """The task that adds the most."""
        return max(self.temporary, key=self.temporary.__getitem__)

    @property
    def peak(self) -> float:
        return sum(self.resident.values()) + max(self.temporary.values(), default=0.0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.cluster.usable


@dataclasses.dataclass(frozen=True)
class PlacedStage:
    """The estimate of a stage.

    Attributes:
      stage: the stage.
      placement: the devices and the mesh of each role.
      groups: the devices by the roles that they have.
      tasks: (the role that runs it, the calls of an iteration, the estimate of a call) of each task.
      moves: seconds in which a role receives weights, by role.
      iteration: seconds of an iteration.
      iterations: the number of iterations in the run.
      hosts: the number of hosts of the devices.
    """

    stage: str
    placement: Placement
    groups: tuple[DeviceGroup, ...]
    tasks: tuple[tuple[str, float, TaskEstimate], ...]
    moves: Mapping[str, float]
    iteration: float
    iterations: int
    hosts: int

    @property
    def one_program(self) -> bool:
        """Whether one process can have all devices: one host, and thus one kind."""
        return self.hosts == 1

    @property
    def seconds(self) -> float:
        """Seconds of all iterations."""
        return self.iteration * self.iterations

    @property
    def fits(self) -> bool:
        return all(group.fits for group in self.groups)


def machine_of(clusters: Sequence[Cluster]) -> Machine:
    """The hosts of clusters, whose devices are numbered one cluster after another."""
    hosts = []
    for cluster in clusters:
        whole, rest = divmod(cluster.devices, cluster.chip.chips_per_host)
        hosts += [Host(cluster.chip.name, size) for size in (*(cluster.chip.chips_per_host,) * whole, *(rest,) * bool(rest))]
    return Machine(tuple(hosts))


def owner_of(clusters: Sequence[Cluster], devices: DeviceSlice) -> Cluster:
    """The cluster that has the devices of a slice. Devices are numbered one cluster after another."""
    ends = itertools.accumulate(cluster.devices for cluster in clusters)
    return next(cluster for cluster, end in zip(clusters, ends, strict=True) if devices.start < end)


def check_groups(placement: Placement, groups: Sequence[tuple[tuple[str, ...], Cluster]]) -> None:
    """Raises UserError unless each role is on the devices that a group names it for. groups: (roles, devices), in order."""
    first = 0
    for roles, cluster in groups:
        own = DeviceSlice(first, cluster.devices)
        first = own.stop
        for role in roles:
            if role not in placement.roles:
                raise UserError(f"--topology names {role}, but the placement has {', '.join(placement.roles)}; leave it out")
            if not own.covers(placement.roles[role].devices):
                raise UserError(f"--topology puts {role} on {cluster.name}, devices {own}, but config.placement puts it on "
                                f"devices {placement.roles[role].devices}; number the devices in the order of the topologies")


@dataclasses.dataclass(frozen=True)
class StageOnDevices:
    """A stage with its placement on clusters.

    Attributes:
      given: the inputs of the plan.
      stage: the stage, one of `PLACED_STAGES`.
    """

    given: Given
    stage: str

    @functools.cached_property
    def clusters(self) -> tuple[Cluster, ...]:
        return (self.given.cluster, *self.given.others)

    @functools.cached_property
    def placement(self) -> Placement:
        """Raises UserError if the placement is not possible."""
        config, settings = self.given.config, self.given.config.placement
        policy = self.given.policy
        run = PLACED_STAGES[self.stage](config, TaskEstimator.on_mesh(config.mesh, policy))
        return resolve_run(run, machine_of(self.clusters), settings.strategy, settings.roles, settings.generation_devices)

    def cluster(self, devices: DeviceSlice) -> Cluster:
        """The devices of a slice as a cluster; a whole cluster keeps its shape."""
        owner = self.owner(devices)
        return owner if owner.devices == devices.count else dataclasses.replace(part_of(owner.chip, devices.count),
                                                                                usable=owner.usable)

    def owner(self, devices: DeviceSlice) -> Cluster:
        """The cluster that has the devices of a slice."""
        return owner_of(self.clusters, devices)

    def config(self, place: RolePlacement) -> Config:
        """The config with the mesh of a role as config.mesh."""
        mesh = self.given.config.mesh
        turns = mesh.pipeline_micro_batches if place.mesh["pipeline"] > 1 else 0
        own = dataclasses.replace(mesh, **place.mesh, slices=1, pipeline_micro_batches=turns)
        return dataclasses.replace(self.given.config, mesh=own)

    @functools.cache  # noqa: B019  Few stages exist.
    def estimator(self, role: str) -> TaskEstimator:
        """The estimates of tasks on the devices of a role."""
        place = self.placement.roles[role]
        config, cluster = self.config(place), self.cluster(place.devices)
        check_divides(self.given.policy, config.mesh)
        policy = TaskEstimator.on_mesh(config.mesh, with_attention(self.given.policy, cluster))
        return TaskEstimator(config, policy, cluster, self.given.assumptions)


def estimate_stage(given: Given, stage: str) -> PlacedStage:
    """The plan of a stage with `config.placement`, which is neither flat nor auto.

    Raises:
      UserError: the placement is not possible on the devices.
    """
    on = StageOnDevices(given, stage)
    placement, config = on.placement, given.config
    if stage == "ppo":
        check_options(config.ppo, {role: on.estimator(role).policy.sharding for role in placement.roles})
    tasks = placed_tasks(on.estimator, placement, stage, given.prompt, given.examples)
    repeated = config.rounds if config.rounds > 1 and stage in rounds.repeated_stages(config) else 1
    iterations = getattr(config, stage).iterations * repeated
    estimates = [(one, on.estimator(one.role).of(one.task, ())) for one in tasks]
    timed = tuple((one.role, one.task.calls / iterations, each) for one, each in estimates)
    moves = {role: _move(on, role, trained) for role, trained in (("generator", "policy"), ("value", "critic"))
             if role in placement.roles and any(one.role == role for one in tasks)}
    groups = tuple(_groups(on, estimates, config))
    seconds = [(role, each.task.phase, each.seconds * calls) for role, calls, each in timed]
    names = {role: tuple(str(group.devices) for group in groups if place.devices.covers(group.devices))
             for role, place in placement.roles.items()}
    ahead = stage == "ppo" and config.ppo.sample_ahead
    iteration = seconds_of_iteration(Durations(tuple(seconds), moves, names, ahead))
    machine = machine_of(on.clusters)
    hosts = {host for place in placement.roles.values() for host in machine.spans(place.devices)}
    return PlacedStage(stage, placement, groups, timed, moves, iteration, iterations, len(hosts))


def estimate_placed(given: Given) -> RunEstimate:
    """The plan of a run with `config.placement`, which is neither flat nor auto; the other stages run on config.mesh."""
    check(given.config)
    stages = [stage for stage in PLACED_STAGES if stage in given.config.stages]
    placed = tuple(estimate_stage(given, stage) for stage in stages)
    run = given.estimate()
    others = tuple(task for task in run.tasks if task.task.stage not in stages)
    return dataclasses.replace(run, tasks=others, placed=placed, others=given.others)


def _move(on: StageOnDevices, role: str, trained: str) -> float:
    """Seconds in which a role receives the weights of the one that it shadows: the trained parameters, in float32."""
    source, target = on.placement.roles[trained], on.placement.roles[role]
    if (source.devices, source.mesh) == (target.devices, target.mesh):
        return 0.0
    estimator = on.estimator(role)
    size = 4.0 * role_weights(estimator.config, estimator.policy, MODELS.get(role, role))[1].trained
    shards = target.devices.count // target.mesh["data"]
    near = on.owner(source.devices) is on.owner(target.devices)
    if near and on.owner(source.devices).chip.kind == "gpu":
        hosts = machine_of(on.clusters)
        near = hosts.spans(source.devices) == hosts.spans(target.devices)
    clusters = on.cluster(source.devices), on.cluster(target.devices)
    return moving_seconds(size, shards, *clusters, near) / on.given.assumptions.network


def _groups(on: StageOnDevices, estimates: Sequence[tuple[PlacedTask, TaskEstimate]], config: Config) -> Iterator[DeviceGroup]:
    places = on.placement.roles
    cuts = sorted({end for place in places.values() for end in (place.devices.start, place.devices.stop)})
    for start, stop in itertools.pairwise(cuts):
        devices = DeviceSlice(start, stop - start)
        here = [role for role, place in places.items() if place.devices.covers(devices)]
        if not here:
            continue
        resident = {}
        for role in here:
            resident |= _resident(on, role, places[role], config)
        temporary = {f"{one.task.phase} ({', '.join(one.task.runs)})": sum(each.temporary.values())
                     for one, each in estimates if one.role in here}
        if "policy" in here and (on.stage != "ppo" or config.ppo.checks.step_zero):
            temporary[STEP_ZERO] = _step_zero(on, estimates)
        yield DeviceGroup(devices, on.owner(devices), {name: size for name, size in resident.items() if size}, temporary)


def _resident(on: StageOnDevices, role: str, place: RolePlacement, config: Config) -> dict[str, float]:
    """Bytes on a device of a role's weights and optimizer state; the base under adapters once for each mesh."""
    estimator = on.estimator(role)
    name = MODELS.get(role, role)
    if name == "judge":
        return {}  # Not modelled, as in `estimate`.
    own = role_weights(estimator.config, estimator.policy, name)[1]
    sizes = {role: own.parameters * (config.preference.members if name == "preference model" else 1)}
    if role in ("policy", "critic"):
        section = getattr(config, on.stage)
        kind = (section.critic_optimizer if role == "critic" else section.optimizer).kind
        sizes[f"{role}'s optimizer"] = own.optimizer[kind]
    if estimator.policy.lora is not None:
        sizes[f"frozen base ({place.devices}:{meshes.text(place.mesh)})"] = own.frozen
    return sizes


def _step_zero(on: StageOnDevices, estimates: Sequence[tuple[PlacedTask, TaskEstimate]]) -> float:
    """Bytes that the checks of step 0 add on the policy's devices: gradients of a whole batch and of its micro-batches, and the
    reference, of which the policy's mesh gets a copy if it has another one."""
    estimator, places = on.estimator("policy"), on.placement.roles
    own, gpu = estimator.weights("policy"), estimator.cluster.chip.kind == "gpu"
    update = next(one.task for one, _ in estimates if one.task.phase == "update" and one.role == "policy")
    rows, parts = 2 * max(1, update.rows.rows // update.micro), 2
    if on.stage == "ppo":
        section = estimator.config.ppo
        rows, _, parts = checked_rows(section, section.batch, update.rows.length, *rows_split(own[0].sharding))
    size = sum(memory.checks(*own, dataclasses.replace(update.rows, rows=rows), parts, gpu).values())
    policy, reference = places["policy"], places["reference"]
    same = (policy.devices, policy.mesh) == (reference.devices, reference.mesh)
    return size if same or on.stage != "ppo" else size + own[1].parameters
