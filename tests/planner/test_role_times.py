"""Times and memory of one role against hand calculations."""

from __future__ import annotations

import dataclasses

import pytest
from planner import published_placements as published
from planner.planned import config

from jaxalign.errors import UserError
from jaxalign.placement import meshes
from jaxalign.planner import work
from jaxalign.planner.estimate import TaskEstimator, check_divides
from jaxalign.planner.hardware import chips, gpu_cluster, topology_cluster
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.programs import Task
from jaxalign.planner.role_models import ExecutionModel, RoleModel, Workload, part_of, placed, role_meshes
from jaxalign.planner.role_times import role_times, transfer_seconds
from jaxalign.planner.topology import parse_topology

PARAMETERS = 6_738_415_616
"""Llama 2 7B, as published."""
ROWS = Workload(1024, 1024, 64, minibatches=2)
A100 = chips()["A100-80"]


def times(role: str = "policy", count: int = 8, engine: ExecutionModel = published.MEGATRON, workload: Workload = ROWS, **mesh):
    size = {"data": count} if not mesh else mesh
    return role_times(RoleModel(role, published.llama("7B")), meshes.complete(size), part_of(A100, count), workload, engine)


def test_a_trained_role_holds_twelve_bytes_a_parameter_and_a_frozen_one_two():
    assert times(tensor=8).resident * 8 == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert times("reference", tensor=8).resident * 8 == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert times(data=8).resident == pytest.approx(12 * PARAMETERS, rel=1e-3)
    assert times(fsdp=8, engine=ExecutionModel()).resident * 8 == pytest.approx(12 * PARAMETERS, rel=1e-3)


def test_a_role_that_does_not_fit():
    assert not times(data=8).fits(80e9) and times(tensor=8).fits(80e9)


def test_an_update_is_bound_by_arithmetic():
    # Four forward passes with recomputed layers, 2 FLOPs a parameter and token, without the embedding, plus attention over half
    # of each row: 4 T D a token and layer, of which half. The head, at 1,024 of 2,048 positions, is also computed four times.
    tokens, layers = 64 * 2048, PARAMETERS - 2 * 32000 * 4096
    flops = 4 * tokens * (2 * layers + 32 * 0.5 * 4 * 2048 * 4096) + 4 * 64 * 1024 * 2 * 32000 * 4096
    update = times(tensor=8, engine=dataclasses.replace(published.MEGATRON, overlapped=True)).fastest("training", 60e9)
    assert update.bound == "compute"
    assert update.seconds == pytest.approx(flops / (8 * 312e12 * 0.5), rel=0.03)


def test_decoding_is_bound_by_the_weights_and_the_cache():
    generation = times(tensor=8, count=8).fastest("generation", 60e9)
    cache = 64 * 2048 * 32 * 2 * 4096 * 2
    assert (generation.bound, generation.parts, generation.tensor) == ("memory", 1, 8)
    # A step reads the weights and the cache. Its 64 all-reduces have 14 steps each and 64 rows of 4,096 numbers.
    reads = (2 * (PARAMETERS - 32000 * 4096) + cache) / 8 / (2039e9 * 0.8)
    each = reads + 64 * (6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * 64 * 4096 * 2 / (300e9 * 0.8))
    prefill = 64 * 1024 * 2 * PARAMETERS / 8 / (312e12 * 0.5) + 64 * 2 * 7 / 8 * 64 * 1024 * 4096 * 2 / (300e9 * 0.8)
    kernels = 32 * 19 * 1.9e-6  # Of a step: 19 of each layer, with 1.9 us each.
    assert generation.seconds == pytest.approx(1023 * (each + kernels) + prefill, rel=0.02)


@pytest.mark.parametrize("machine", [gpu_cluster("H200x1"), topology_cluster(parse_topology("v5e:1x1"))])
def test_sampling_takes_the_time_and_the_memory_of_the_plan(machine, monkeypatch):
    """On one device, since the plan has no latency of collectives."""
    mesh, engine = meshes.complete({}), ExecutionModel()
    role = RoleModel("policy", published.llama("7B"))
    model, own = placed(role, mesh, machine, engine)
    monkeypatch.setattr(TaskEstimator, "weights", lambda *_: (model, own))
    task = Task("ppo", "generate", ("policy",), BatchShape(64, 512, 256), counted=1)
    planned = TaskEstimator(config(), model, machine, engine.fractions).of(task, ())
    found = role_times(role, mesh, machine, Workload(512, 256, 64), engine).tasks["generation"]
    (sampled,) = (one for one in found if one.parts == 1)
    cast = work.generate(model, own, task)[0].hbm / (machine.chip.hbm * engine.fractions.hbm)  # Of the weights.
    assert sampled.seconds == pytest.approx(planned.seconds - cast) and (planned.launch > 0) == (machine.chip.kind == "gpu")
    assert sampled.temporary == pytest.approx(sum(planned.temporary.values()))


@pytest.mark.parametrize("phase", ["generation", "scoring", "training"])
def test_less_memory_takes_more_parts_and_no_less_time(phase):
    own = times("critic" if phase == "scoring" else "policy", tensor=8)
    chosen = [own.fastest(phase, free) for free in (70e9, 40e9, 20e9, 10e9, 5e9, 2e9, 0)]
    assert chosen[0] is not None and chosen[-1] is None
    kept = [one for one in chosen if one]
    assert all(b.seconds >= a.seconds and b.temporary <= 70e9 for a, b in zip(kept, kept[1:], strict=False))
    assert phase != "generation" or kept[-1].parts > kept[0].parts


def test_weights_move_as_in_the_table_of_hybridflow():
    # p = 1, t = 8, d = 2, t_g = 2 on 16 GPUs: 0.375 of the weights for each.
    own = times(count=16, data=2, tensor=8)
    moved = {one.tensor: one.moved for one in own.tasks["generation"]}
    assert moved[2] * 300e9 * 0.8 == pytest.approx(0.375 * 2 * PARAMETERS, rel=1e-2)
    assert moved[8] == 0


def test_a_transfer_to_other_hosts_is_limited_by_their_network():
    generator = RoleModel("generator", published.llama("7B"))
    seconds = transfer_seconds(generator, 4, part_of(A100, 16), part_of(A100, 8), ExecutionModel())
    assert seconds == pytest.approx(2 * PARAMETERS / 4 / (25e9 * 0.8), rel=1e-3)
    near = transfer_seconds(generator, 4, part_of(A100, 4), part_of(A100, 4), ExecutionModel())
    assert near == pytest.approx(2 * PARAMETERS / 4 / (300e9 * 0.8), rel=1e-3)


def test_meshes_divide_the_model_and_keep_tensor_within_a_host():
    role = RoleModel("policy", published.llama("13B"))
    every = list(role_meshes(role, part_of(A100, 48), ExecutionModel()))
    assert every and {mesh["tensor"] for mesh in every} == {1, 2, 4, 8}
    assert all(meshes.size(mesh) == 48 for mesh in every)
    for mesh in every:  # 5,120 wide: fsdp 48 does not divide it.
        check_divides(role.model, published.Mesh(**mesh))
    with pytest.raises(UserError):
        check_divides(role.model, published.Mesh(fsdp=48))


def test_a_batch_that_does_not_divide_is_filled_up_only_if_asked():
    workload = dataclasses.replace(ROWS, batch=60)
    assert times(data=8, workload=workload) is None
    padded = times(data=8, workload=dataclasses.replace(workload, padded=True))
    # 30 rows of an update become 32, as many as 64 rows of a batch have in an update.
    assert padded.tasks["training"] == times(data=8).tasks["training"]


def test_latency_makes_small_steps_slower_on_more_devices():
    # In each of 32 layers and 3 passes are 2 all-reduces of 8.4 + 14 * 3.4 us in a ring of 8, and of 8.4 + 2 * 3.4 us in one of
    # 2. Everything else takes at least a quarter as long on 8 devices as on 2.
    short = Workload(8, 8, 8)
    two, eight = (times(count=count, tensor=count, workload=short).fastest("training", 1e15) for count in (2, 8))
    assert eight.seconds > two.seconds / 4 + 192 * (8.4e-6 + 14 * 3.4e-6 - (8.4e-6 + 2 * 3.4e-6) / 4)


@pytest.mark.parametrize(("chip", "count", "shape"), [("v5p", 16, (2, 2, 4)), ("v5e", 8, (2, 4)), ("H100-80", 24, (24,))])
def test_the_shape_of_a_part(chip, count, shape):
    assert part_of(chips()[chip], count).shape == shape


@pytest.mark.parametrize("machine", [*map(gpu_cluster, ("H100x8", "RTX4090x8")),
                                     *map(topology_cluster, map(parse_topology, ("h100:1x8", "v5e:2x4")))])
def test_a_part_of_a_machine_has_the_usable_memory_of_its_devices(machine):
    assert part_of(machine.chip, 4).usable == machine.usable < 80e9
