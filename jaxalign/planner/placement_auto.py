"""Chooses the placement of stage ppo for the devices that a run has: `config.placement.strategy=auto`.

The candidates are those of `placement_choices` with the run's own `ppo.micro_batch_tokens`, and flat on `config.mesh`. They
give the same results, but for rounding. Flat on `config.mesh` is kept unless another one is clearly faster, as the estimate is
coarse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxalign.config import Config, check
from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.planner.hardware import Cluster, chip_of, chips
from jaxalign.planner.micro_batches import ALIKE
from jaxalign.planner.placement_choices import accepted, joined, problem_of, refusal
from jaxalign.planner.placement_parts import in_parts, samples_at_once
from jaxalign.planner.placement_report import GB, title
from jaxalign.planner.placement_schedules import FLAT, search_schedules, separated
from jaxalign.planner.placement_search import Found, Problem, assemble
from jaxalign.planner.placement_sets import PlacedSet, SetMember, names
from jaxalign.planner.role_models import GENERATION, SCORING, TRAINING, part_of
from jaxalign.planner.role_times import role_times
from jaxalign.planner.search import Given, mesh_words

GAIN = 0.05
"""Flat on config.mesh is kept unless another placement saves at least this share of its time."""
ASSUMED = "H100-80"
"""The chip of which the figures stand for an accelerator that the planner does not know."""

_MODELLED = {"generation": "tensor", "context": 1, "slices": 1}
"""The values of fields of config.mesh that the search models."""


@dataclasses.dataclass(frozen=True)
class AutoPlacement:
    """The placement that a run chose.

    Attributes:
      strategy: "flat" if all roles share one mesh and its programs, else "custom".
      roles: the entries of all roles, as in config.placement.roles; empty for flat on config.mesh.
      sentences: the reasons, one for each printed line.
      seconds, peak: the estimated seconds of an iteration, and bytes on the device that needs the most; None without estimate.
      flat_seconds, flat_peak: those of flat on config.mesh.
    """

    strategy: str = FLAT
    roles: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    seconds: float | None = None
    peak: float | None = None
    flat_seconds: float | None = None
    flat_peak: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AutoPlacement:
        """Reads `to_dict`. Raises TypeError if a field is unknown."""
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def attached_cluster(devices: Sequence[jax.Device]) -> tuple[Cluster | None, str]:
    """(the devices as a cluster, a sentence on its assumptions or why there is none).

    A GPU has the memory that JAX allows programs. CPU devices are no cluster: they share the cores of one host, so that no
    placement is faster than another.
    """
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        return None, f"the devices are of unlike kinds ({', '.join(kinds)}), which the planner does not model"
    if devices[0].platform == "cpu":
        return None, "CPU devices share the cores of one host, so no placement is faster than another"
    chip, sentence = chip_of(kinds[0]), ""
    if chip is None:
        chip = chips()[ASSUMED]
        sentence = f"the planner does not know {kinds[0]}, so the times are those of as many {ASSUMED}"
    own = [device for device in devices if device.process_index == jax.process_index()]
    limits = [stats["bytes_limit"] for device in own if (stats := device.memory_stats()) and "bytes_limit" in stats]
    if limits and chip.kind == "gpu":  # The memory that JAX lets programs use. `Chip` has that of a TPU.
        chip = dataclasses.replace(chip, usable=float(min(limits)))
    return part_of(chip, len(devices)), sentence


def choose_attached(config: Config, policy, devices: Sequence[jax.Device]) -> AutoPlacement:
    """The placement of stage ppo on the devices of this run. policy: its model; its sharding is not used."""
    if len({device.process_index for device in devices}) > 1:
        return _flat("this run has several processes, in which only strategy flat works")
    cluster, sentence = attached_cluster(devices)
    if cluster is None:
        return _flat(sentence)
    chosen = choose(Given(config, policy, cluster))
    return dataclasses.replace(chosen, sentences=(*chosen.sentences, *([sentence] if sentence else [])))


def choose(given: Given) -> AutoPlacement:
    """The placement of stage ppo on a cluster. The sentence says why it is flat if the search does not cover the run."""
    placement = dataclasses.replace(given.config.placement, strategy=FLAT, roles=())
    given = dataclasses.replace(given, config=dataclasses.replace(given.config, placement=placement))
    mesh = given.config.mesh
    unlike = [f"config.mesh.{name} is {getattr(mesh, name)!r}, and the search models {modelled!r} only"
              for name, modelled in _MODELLED.items() if getattr(mesh, name) != modelled]
    refused = refusal(given) or next(iter(unlike), "")
    if refused:
        return _flat(refused)
    try:
        plan = given.estimate()
        problem = problem_of(given, plan)
        flat = _Timed(_on_config_mesh(given, problem), max(each.peak for each in plan.tasks if each.task.stage == "ppo"))
        candidates = _usable(given, problem, search_schedules(problem, apart=not given.config.ppo.sample_ahead))
        ahead = [dataclasses.replace(one, found=dataclasses.replace(one.found, seconds=ahead_seconds(one.found)))
                 for one in _usable(given, problem, separated(problem))]
    except UserError as error:
        return _flat(str(error))
    if given.config.ppo.sample_ahead:
        candidates, ahead = candidates + ahead, []
    return _chosen(given, flat, candidates, ahead)


def _flat(sentence: str) -> AutoPlacement:
    return AutoPlacement(sentences=(f"flat, because {sentence}",))


def _on_config_mesh(given: Given, problem: Problem) -> Found:
    """All roles on config.mesh. Raises UserError if the batch does not divide over it."""
    mesh = {axis: getattr(given.config.mesh, axis) for axis in meshes.AXES}
    cluster = part_of(given.cluster.chip, meshes.size(mesh))
    members = []
    for role in problem.roles:
        times = role_times(role, mesh, cluster, problem.workload, problem.engine)
        if times is None:
            raise UserError(f"the batch of stage ppo does not divide over config.mesh ({mesh_words(given.config.mesh)})")
        variants = {phase: next(v for v in some if phase != GENERATION or v.parts == 1) for phase, some in times.tasks.items()}
        members.append(SetMember(role, times, variants))
    group = PlacedSet(tuple(members), given.cluster.chip, cluster.devices, given.cluster.usable)
    return in_parts(assemble(problem, [(0, group)], FLAT), given.config.ppo.micro_batch_tokens, problem)


@dataclasses.dataclass(frozen=True)
class _Timed:
    """A placement, and the bytes on the device that needs the most."""

    found: Found
    peak: float

    @property
    def seconds(self) -> float:
        return self.found.seconds

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s per iteration, {self.peak / GB:.3g} GB on a device"


def _usable(given: Given, problem: Problem, every: Iterable[Found]) -> list[_Timed]:
    """The placements that fit and that a run accepts, with the run's micro-batches."""
    config, usable = given.config, []
    for found in filter(samples_at_once, every):
        found = in_parts(found, config.ppo.micro_batch_tokens, problem)
        peak = max(group.peak for group in found.sets)
        custom = dataclasses.replace(config.placement, strategy="custom", roles=joined(found.entries))
        if peak <= given.cluster.usable and accepted(given, problem, dataclasses.replace(config, placement=custom)):
            usable.append(_Timed(found, peak))
    return usable


def ahead_seconds(found: Found) -> float:
    """Seconds of an iteration of schedule "separate" with `ppo.sample_ahead`, as `rl.placed` runs it.

    Sampling overlaps the update; also scoring, if no role that scores is on the generator's devices.
    """
    phases = found.phases
    generator = next(group for group in found.sets if group.phases[GENERATION])
    scoring, before = phases[SCORING], 0.0
    if generator.phases[SCORING]:
        scoring, before = 0.0, phases[SCORING]
    return before + max(phases[GENERATION], scoring + phases[TRAINING]) + found.moved


def _chosen(given: Given, flat: _Timed, candidates: list[_Timed], ahead: list[_Timed]) -> AutoPlacement:
    """The best placement, with its reasons. flat: the one on config.mesh. ahead: those with `ppo.sample_ahead`."""
    usable = given.cluster.usable
    fastest = min((one.seconds for one in candidates), default=0.0)
    # Of those as fast as the best one, the one with the fewest sets.
    best = min(candidates, key=lambda one: (max(one.seconds, ALIKE * fastest), len(one.found.sets), one.seconds), default=None)
    on_config_mesh = f"flat on config.mesh ({mesh_words(given.config.mesh)})"
    if best is None or (flat.peak <= usable and best.seconds > (1 - GAIN) * flat.seconds):
        chosen, strategy, roles, name = flat, FLAT, (), on_config_mesh
        other = "no other placement fits" if best is None else f"the fastest other placement takes {best.seconds:.3g} s"
    else:
        chosen, roles = best, joined(best.found.entries)
        strategy = FLAT if best.found.schedule == FLAT and len(roles) == 1 else "custom"
        devices, _, mesh = roles[0].partition("=")[2].partition(":")
        name = f"flat with {mesh} on devices {devices}" if strategy == FLAT else _kind(best.found)
        other = f"{on_config_mesh}: {flat}" + (", too much" if flat.peak > usable else "")
    fitting = f"of {usable / GB:.3g} GB usable" + (", too much" if chosen.peak > usable else "")
    sentences = [f"{name} of {given.cluster.name}, estimated: {chosen} {fitting}; {other}"]
    quicker = min((one.seconds for one in ahead), default=chosen.seconds)
    if quicker < (1 - GAIN) * chosen.seconds and _may_sample_ahead(given.config):
        sentences.append(f"config.ppo.sample_ahead=True would take {quicker:.3g} s per iteration, with responses that are one "
                         "update old; auto does not set it, because it changes the results")
    return AutoPlacement(strategy, roles, tuple(sentences), chosen.seconds, chosen.peak, flat.seconds, flat.peak)


def _kind(found: Found) -> str:
    """A schedule in words, with its sets: "sets (policy, critic | reference, reward)"."""
    return f"{title(found)} ({' | '.join(', '.join(names([one.role for one in group.members])) for group in found.sets)})"


def _may_sample_ahead(config: Config) -> bool:
    try:
        check(dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, sample_ahead=True)))
    except UserError:
        return False
    return True

