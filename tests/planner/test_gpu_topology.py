"""Topologies of GPUs: descriptions against the data sheets, errors, networks, and programs if the GPU compiler is installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxalign.config import Mesh as MeshConfig
from jaxalign.errors import UserError
from jaxalign.models import model as model_module
from jaxalign.models import unstacked
from jaxalign.models.attention.dispatch import kind_of_attention
from jaxalign.models.model import Model
from jaxalign.parallel.mesh_program import MeshProgram
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner import gpu_topology
from jaxalign.planner.compiled import compile_run
from jaxalign.planner.compiler import compile_lowered, lower
from jaxalign.planner.gpu_topology import gpu_kinds, target_text
from jaxalign.planner.hardware import topology_cluster
from jaxalign.planner.hlo_text import parse
from jaxalign.planner.network import bandwidths
from jaxalign.planner.programs import PlannedProgram
from jaxalign.planner.shapes import policy_model
from jaxalign.planner.stored_arrays import copied_in_loops
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.rollout.ring import decode_program
from jaxalign.rollout.sampling import Sampling
from tests import tiny
from tests.planner.planned import compile_program
from tests.planner.tiny_config import config

needs_cuda = pytest.mark.skipif(
    all(importlib.util.find_spec(f"jax_cuda{version}_plugin") is None for version in (12, 13)),
    reason="the GPU compiler is not installed",
)
ONE = dict.fromkeys(("data", "fsdp", "tensor", "context", "pipeline"), 1)


@pytest.mark.parametrize(("text", "chips"), [("h100:1x8", 8), ("h200:4x8", 32), ("a100:2x8", 16), ("b200:1x8", 8),
                                             ("gb200:18x4", 72), ("a100-40:1x2", 2)])
def test_gpus_of_a_topology(text, chips):
    found = parse_topology(text)
    assert (found.chips, found.name) == (chips, text) and parse_topology(text.replace("h", "H")).name == text
    assert topology_cluster(found).devices == chips and topology_cluster(found).usable == found.usable


def test_published_figures():
    """NVIDIA's papers on the A100 and H100 architectures: SMs, L2 cache, shared memory of an SM, compute capability."""
    known = {kind: (row["device"]["core_count"], row["device"]["l2_cache_size"] >> 20,
                    row["device"]["shared_memory_per_core"] >> 10, row["compute_capability"][:2])
             for kind, row in gpu_kinds().items()}
    assert known["a100"] == (108, 40, 164, [8, 0]) and known["h100"] == known["h200"] == (132, 50, 228, [9, 0])
    assert all(len(row["source"]) > 40 for row in gpu_kinds().values())


@pytest.mark.parametrize("kind", gpu_kinds())
def test_usable_memory_leaves_5_percent_to_the_driver_and_3_percent_to_fragmentation(kind):
    found, chip = parse_topology(f"{kind}:1x4"), topology_cluster(parse_topology(f"{kind}:1x4")).chip
    assert found.usable == int(found.memory * 0.95 * 0.97)
    # The data sheet's figure is in units of 1e9 bytes for the A100 and the H200, and in GiB for some GPUs.
    assert 0.97 * chip.memory < found.memory < 1.075 * chip.memory


@pytest.mark.parametrize(("text", "sentence"), [
    ("h10:1x8", "'h10' is not one of the known TPU generations: v4, .* or GPUs: a100, .*, gb200; did you mean h100"),
    ("h100:8", "'h100:8'; expected a kind of GPU, the hosts and the GPUs of each host, as in h100:1x8"),
    ("h100:1x8x2", "expected a kind of GPU"),
    ("h100:0x8", "expected a kind of GPU"),
    ("h100:1x3", "'h100:1x3' with 3 GPUs per host; a host with H100-80 has 1, 2, 4, 8, as in h100:1x8"),
    ("gb200:2x8", "a host with GB200 has 1, 2, 4, as in gb200:2x4"),
    ("h100:4096x8", "has 32768 GPUs; at most 16384 of H100-80"),
    ("nowhere.txtpb:1x8", "nowhere.txtpb, which cannot be read .No such file or directory.; known kinds: a100, "),
])
def test_an_invalid_topology_is_refused_with_a_remedy(text, sentence):
    with pytest.raises(UserError, match=sentence):
        topology_cluster(parse_topology(text))


def test_hosts_that_the_slices_do_not_divide_are_refused():
    assert parse_topology("h100:4x8", slices=2).chips == 32  # The name has all hosts.
    with pytest.raises(UserError, match=r"'h100:3x8' with 3 hosts, which config.mesh.slices \(2\) does not divide"):
        parse_topology("h100:3x8", slices=2)


def test_a_mesh_larger_than_the_topology_is_refused():
    with pytest.raises(UserError, match="the mesh has 16 devices, but topology h100:1x8 has 8"):
        topology_devices(parse_topology("h100:1x8"), 16)


def test_a_description_file_is_read_and_an_incomplete_one_is_refused(tmp_path):
    text = target_text(gpu_kinds()["h100"])
    file = tmp_path / "mine.txtpb"
    file.write_text("# My own.\n" + text.replace("84942979072", "50000000000"))
    found = parse_topology(f"{file}:2x4")
    assert (found.memory, found.hosts, found.gpus, found.device_kind) == (50_000_000_000, 2, 4, "NVIDIA H100 80GB HBM3")
    assert topology_cluster(found).chip.bf16_flops == 989e12
    for change, sentence in (
        (("core_count: 132", ""), "lacks core_count; write a GpuTargetConfigProto with all of them"),
        (("CUDA", "ROCM"), "is for the platform 'ROCM'; only CUDA is supported"),
        (("NVIDIA H100 80GB HBM3", "NVIDIA T4"), "describes 'NVIDIA T4', and the plan has only the rates of other GPUs"),
    ):
        file.write_text(text.replace(*change))
        with pytest.raises(UserError, match=sentence):
            topology_cluster(parse_topology(f"{file}:1x8"))


def test_nvlink_connects_a_host_and_of_gb200_a_rack():
    """Bytes/s one way: NVLink has 900 GB/s both ways on the H100 and 1800 on the GB200; each GPU has 400 Gbit/s outside."""
    hosts = topology_cluster(parse_topology("h100:4x8"))
    assert bandwidths(hosts, ONE | {"data": 4, "fsdp": 8}) == {"fsdp": 450e9, "data": 50e9}
    assert bandwidths(topology_cluster(parse_topology("h100:2x4")), ONE | {"fsdp": 8}) == {"fsdp": 50e9}
    rack = topology_cluster(parse_topology("gb200:36x4"))
    assert bandwidths(rack, ONE | {"data": 2, "fsdp": 72}) == {"fsdp": 900e9, "data": 50e9}


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(gpu_topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed; run: pip install 'jaxalign\[aot-cuda\]'"):
        topology_devices(parse_topology("h100:1x8"))


def test_a_compiler_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(gpu_topology.importlib.util, "find_spec", lambda name: "found" if "12" in name else None)
    versions = {"jaxlib": importlib.metadata.version("jaxlib"), "jax-cuda12-plugin": "0.4.1"}
    monkeypatch.setattr(gpu_topology.importlib.metadata, "version", versions.__getitem__)
    with pytest.raises(UserError, match="is jax-cuda12-plugin 0.4.1, but jaxlib is .* pip install -U 'jax-cuda12-plugin=="):
        topology_devices(parse_topology("h100:1x8"))
    versions["jax-cuda12-plugin"] = versions["jaxlib"]
    with pytest.raises(UserError, match=r"lacks cuDNN; run: pip install 'jaxalign\[aot-cuda\]'"):
        topology_devices(parse_topology("h100:1x8"))


@needs_cuda
@pytest.mark.parametrize("kind", gpu_kinds())
def test_the_compiler_accepts_every_description(kind):
    devices = topology_devices(parse_topology(f"{kind}:2x4"))
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert {device.device_kind for device in devices} == {gpu_kinds()[kind]["name"]}
    x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=SingleDeviceSharding(devices[0]))
    assert jax.jit(lambda x: x @ x.T).lower(x).compile().memory_analysis().output_size_in_bytes == 8 * 8 * 4


@needs_cuda
def test_the_gpu_compiler_counts_the_memory_and_the_traffic_of_a_program():
    """Six weights of bfloat16 [1024, 1024], an eighth on each device, are gathered one by one."""
    topology = parse_topology("h100:1x8")
    mesh = Mesh(np.asarray(topology_devices(topology)), ("fsdp",))
    weight = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "fsdp")))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    step = jax.jit(lambda params, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params)[0])
    found = compile_program(PlannedProgram("ppo", "update", "policy", step, (weight, x), {}), topology.usable)
    assert found.memory.arguments == (6 + 1) * 1024 * 1024 * 2 // 8 and found.memory.outputs == 1024 * 1024 * 2 // 8
    assert found.fits and found.flops is None and found.products == 6 * 2 * 128 * 1024 * 1024
    (gather,) = found.collectives
    assert (gather.kind, gather.weight, gather.axes, gather.times) == ("all-gather", "params", ("fsdp",), 6)
    assert gather.total == 6 * 1024 * 1024 * 2 * 7 / 8 and not gather.overlapped
    assert sum(count for kernel, count in found.kernels.items() if kernel in ("Triton product", "cuBLAS")) == 6


@needs_cuda
def test_attention_of_a_topology_is_that_of_cudnn():
    device = topology_devices(parse_topology("h100:1x1"))[0]
    sharding = make_sharding(MeshConfig(), [device])
    model = dataclasses.replace(tiny.DECODER, compute_dtype="bfloat16", head_dim=64)
    assert sharding.nvidia and kind_of_attention(model, sharding, 2, 256) == "cudnn"


@needs_cuda
def test_a_run_compiles_for_two_hosts(tmp_path):
    changes = config(stages=["sft"], mesh={"data": 2, "fsdp": 4, "tensor": 1}, sft={"batch_rows": 8})
    topology = parse_topology("a100:2x4")
    policy = policy_model(changes, make_sharding(changes.mesh, topology_devices(topology)))
    (found,) = compile_run(changes, policy, usable=topology.usable, reports=tmp_path, topology=topology.name)
    assert found.fits and {axis for one in found.collectives for axis in one.axes} == {"data", "fsdp"}
    assert len(list(tmp_path.glob("*-report"))) == 1


@needs_cuda
@pytest.mark.parametrize(("share", "layers", "copies"), [(0.25, 48, False), (0.0, 48, False), (0.25, 0, True)])
def test_a_decoding_step_copies_weights_only_if_the_layers_are_scanned(share, layers, copies, monkeypatch):
    """Unrolled layers are unstacked before the loop, or read in their stacks if they take too much memory. JAX 0.10 also copies
    small kernels there, such as the projections to 1,024 columns."""
    monkeypatch.setattr(model_module, "LAYERED", {"gpu": layers})
    monkeypatch.setattr(unstacked, "SHARE", share)
    device = topology_devices(parse_topology("h100:1x1"))[0]
    decoder = dataclasses.replace(tiny.DECODER, layers=2, compute_dtype="bfloat16", head_dim=64, embed=1024, mlp=4096)
    model = Model(decoder, sharding=make_sharding(MeshConfig(), [device]))
    params, own = model.generation_abstract(model.abstract()), model.generation
    variant, control = Sampling(1, (64,)).variant("threefry2x32"), jax.ShapeDtypeStruct((3,), jnp.int32)
    rows = jax.ShapeDtypeStruct((4 + variant.fields(1), 8), jnp.int32, sharding=own.sharding.named((None, "batch")))
    assert unstacked.unstacks(own, params) == (share > 0 and layers > 0)
    lowered = lower(decode_program(own, params), (own, params, (own.abstract_cache(8, 64),), rows, control, variant, 32))
    report = compile_lowered(lowered)
    copied = copied_in_loops(parse(report.text))
    in_stacks = share == 0
    assert bool({name for name in copied if not in_stacks or "'gate'" in name or "'up'" in name}) == copies, copied
    assert (report.memory.temporary > unstacked.layer_bytes(own, params)) == (not in_stacks and not copies)


@needs_cuda
def test_programs_of_several_gpus_estimate_the_time_of_transfers(monkeypatch):
    """Programs on one GPU have no options, and an option in XLA_FLAGS keeps its value."""
    name, built, jit = "xla_gpu_enable_analytical_latency_estimator", [], jax.jit

    def record(function, *, compiler_options=None, **others):
        built.append(compiler_options)
        return jit(function, **others)

    def rows(devices) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(Mesh(np.array(devices), ("fsdp",)), P("fsdp")))

    monkeypatch.setattr(jax, "jit", record)
    monkeypatch.setenv("XLA_FLAGS", "")
    devices = topology_devices(parse_topology("h100:1x8"))
    program = MeshProgram(lambda x: 2 * x)
    program.lower(rows(devices[:1]))
    assert built == [None]
    program.lower(rows(devices))
    program.trace(rows(devices))
    assert built == [None, {name: True}]
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=false")
    MeshProgram(lambda x: 2 * x).lower(rows(devices))
    assert built == [None, {name: True}, None, None]
