"""Figures of compiled programs: bytes by hand on the CPU, and the TPU compiler's figures if it is installed."""

from __future__ import annotations

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxalign.models.model
from jaxalign.config import Mesh as MeshConfig
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.compiled import compile_run
from jaxalign.planner.compiled_report import text, to_json, verdict
from jaxalign.planner.programs import PlannedProgram, device_bytes
from jaxalign.planner.shapes import policy_model
from jaxalign.planner.topology import parse_topology, topology_devices
from tests.planner.planned import compile_program
from tests.planner.tiny_config import config

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
# The compilation cache cannot load programs for devices that are absent.
pytestmark = [pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")]
KB = 1024


def array(devices, spec: P, *shape: int):
    mesh = Mesh(np.asarray(devices).reshape(-1), ("fsdp",))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def made(step, *arguments, phase="update", **held) -> PlannedProgram:
    return PlannedProgram("ppo", phase, "policy", step, arguments, held)


def test_bytes_of_one_device_by_hand():
    """8 devices; the state, 64 KB on each, is donated to the result; the table is unused but resident."""
    state, batch = array(jax.devices(), P("fsdp"), 8, 16 * KB), array(jax.devices(), P(), KB)
    table, unread = array(jax.devices(), P(None, "fsdp"), 2, 8 * KB), array(jax.devices(), P("fsdp"), 8 * KB)
    step = jax.jit(lambda state, batch, unread: state + batch[0], donate_argnums=0)
    found = compile_program(made(step, state, batch, unread, policy=[state], table=table, reference=unread), usable=90 * KB)
    assert found.memory.arguments == 68 * KB and found.memory.outputs == 64 * KB and found.memory.aliased == 64 * KB
    assert found.resident == {"table": 8 * KB, "reference": 4 * KB}  # an unused argument is not passed
    assert found.memory.peak == 68 * KB + found.memory.temporary + found.memory.code
    assert found.total == found.memory.peak + 12 * KB
    assert found.fits and found.collectives == () and found.warnings == () and found.flops > 0


def test_resident_arrays_that_a_program_does_not_use_count():
    state, beside = array(jax.devices(), P("fsdp"), 8, KB), array(jax.devices(), P("fsdp"), 8, 64 * KB)
    found = compile_program(made(jax.jit(jnp.sin), state, reference=beside), usable=200 * KB)
    assert found.memory.peak < 200 * KB < found.total and not found.fits


def test_a_refused_program_keeps_the_message_of_the_compiler():
    class Refused(Step):
        def compile(self, **options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory\nby 3G")

    state = array(jax.devices(), P("fsdp"), 8, KB)
    found = compile_program(made(Refused(), state, policy=[state]), usable=KB)
    assert (found.memory, found.fits, found.total) == (None, False, None)
    assert found.refusal == "RESOURCE_EXHAUSTED: Ran out of memory\nby 3G" and found.resident == {"policy": 4 * KB}


class Step:
    """A jitted step of one argument, which is also its own traced and lowered form."""

    def __call__(self, state): ...

    def trace(self, *arguments):
        return self

    def lower(self):
        return self

    def as_text(self) -> str:
        return type(self).__name__


def no_text(self):
    raise jax.errors.JaxRuntimeError("INTERNAL: async-update instruction should have 1 operands but sees 3")


def test_traffic_is_read_from_the_compiler_if_jax_cannot_print_a_program(monkeypatch):
    """JAX does not know every instruction of a newer TPU compiler, but the compiler writes the text as well."""
    monkeypatch.setattr(jax.stages.Compiled, "as_text", no_text)
    found = compile_program(made(jax.jit(jnp.sum), array(jax.devices(), P("fsdp"), 8, KB)))
    assert [(one.kind, one.axes, one.operand) for one in found.collectives] == [("all-reduce", ("fsdp",), 4)]


def test_a_program_without_text_gets_a_warning_and_its_memory_is_counted(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "as_text", no_text)
    monkeypatch.setattr(pathlib.Path, "glob", lambda *_: [])
    state = array(jax.devices(), P("fsdp"), 8, KB)
    found = compile_program(made(jax.jit(jnp.sin), state), usable=KB * KB)
    assert found.fits and found.memory.arguments == 4 * KB and found.collectives is None
    assert "its collectives are unknown" in found.warnings[0]
    line = next(line for line in text([found]).splitlines() if line.startswith("ppo update"))
    assert line.split()[-3:-1] == ["?", "?"]  # not 0
    assert to_json([found])[0]["sent_bytes"] is None


def test_any_other_failure_is_raised():
    class Broken(Step):
        def compile(self, **options):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_program(made(Broken()))


@pytest.mark.medium
def test_a_run_on_cpu_devices_reports_each_program_and_the_traffic_of_fsdp():
    changes = config(stages=["sft"], mesh={"data": 1, "fsdp": 4, "tensor": 1}, sft={"micro_batches": 1})
    shown = []
    policy = policy_model(changes, make_sharding(changes.mesh))
    (found,) = compile_run(changes, policy, progress=shown.append)
    assert shown == [found] and verdict(found).startswith("sft update (policy): 0.00 GB, fits, ")
    assert (found.stage, found.phase, found.role) == ("sft", "update", "policy")
    kinds = {one.kind for one in found.collectives}
    assert "all-gather" in kinds and all(one.axes == ("fsdp",) for one in found.collectives)
    assert any(one.weight.startswith("state.params['blocks']") and one.times == 2 for one in found.collectives)  # 2 layers
    assert found.seconds > 0 and compile_run(changes, policy, programs=["ppo"]) == []


@pytest.mark.medium
def test_the_weight_of_the_head_is_gathered_once_for_any_number_of_chunks(monkeypatch):
    """Before, each of 383 chunks gathered it, as compiled programs showed. With adapters it also has no gradient."""
    monkeypatch.setattr(jaxalign.models.model, "CHUNK_FLOATS", 400)  # one position of one row per device, 16 chunks
    changes = config(stages=["sft"], mesh={"data": 1, "fsdp": 4, "tensor": 1}, lora={"rank": 2},
                     model={"tie_embeddings": False})
    (found,) = compile_run(changes, policy_model(changes, make_sharding(changes.mesh)))
    gathers = [one for one in found.collectives if one.weight == "frozen['unembedding']"]
    assert [(one.times, one.axes, one.result) for one in gathers] == [(1, ("fsdp",), 400 * 16 * 4)]


@pytest.mark.slow
def test_the_checks_of_step_0_hold_no_replicated_gradient():
    """They hold two sets of gradients, an eighth of each on every device; replicated, they would exceed twice the model's
    bytes."""
    changes = config(stages=["ppo"], mesh={"data": 1, "fsdp": 8, "tensor": 1}, ppo={"batch": 16, "minibatches": 1},
                     model={"layers": 8, "embed": 32, "mlp": 8192, "remat": True})
    policy = policy_model(changes, make_sharding(changes.mesh))
    (found,) = compile_run(changes, policy, programs=["ppo checks"])
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(policy.abstract()))
    assert found.memory.temporary < 1.5 * whole


@needs_libtpu
def test_the_tpu_compiler_counts_the_memory_and_the_traffic_of_a_program():
    devices = topology_devices(parse_topology("v5e:2x2"))
    weight, x = array(devices, P(None, "fsdp"), 6, 1024, 1024), array(devices, P("fsdp"), 1024, 1024)
    step = jax.jit(lambda params, x: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params)[0])
    found = compile_program(made(step, weight, x), parse_topology("v5e:2x2").usable)
    assert found.memory.arguments == (6 + 1) * 1024 * 1024 and found.memory.outputs == 1024 * 1024  # a quarter of each
    assert found.fits and found.memory.peak < 64 << 20
    assert all(one.axes == ("fsdp",) and one.group == 4 for one in found.collectives)
    gathers = [one for one in found.collectives if one.kind == "all-gather" and one.weight == "params"]
    assert sum(one.times for one in gathers) in (1, 6)  # before the loop, or in each of its iterations


@needs_libtpu
def test_the_tpu_compiler_refuses_what_does_not_fit():
    (device,) = topology_devices(parse_topology("v5e:1x1"))
    huge = array([device], P(), 40, KB, KB, KB)  # 160 GB
    found = compile_program(made(jax.jit(lambda x: x + 1), huge), parse_topology("v5e:1x1").usable)
    assert not found.fits and "RESOURCE_EXHAUSTED" in found.refusal and "15.75G" in found.refusal


@pytest.mark.slow
@needs_libtpu
def test_a_run_compiles_for_a_topology_of_two_slices():
    topology = parse_topology("v5e:2x2", slices=2)
    changes = config(stages=["sft"], mesh={"data": 2, "fsdp": 4, "tensor": 1, "slices": 2}, sft={"batch_rows": 8})
    sharding = make_sharding(MeshConfig(data=2, fsdp=4, slices=2), topology_devices(topology))
    (found,) = compile_run(changes, policy_model(changes, sharding), usable=topology.usable)
    assert found.fits and {axis for one in found.collectives for axis in one.axes} == {"data", "fsdp"}
    # The gradients of all weights are reduced between slices, a quarter per device; small ones are padded.
    apart = [one for one in found.collectives if one.between_slices]
    own = device_bytes([leaf for leaf in jax.tree.leaves(policy_model(changes, sharding).abstract()) if leaf.ndim > 1])
    assert {one.kind for one in apart} == {"all-reduce"} and sum(one.total for one in apart) >= own
