"""Communication of compiled steps: sampling gathers no weights, FSDP gathers the shards of each layer, and ZeRO-1 gathers none
in the backward pass."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxalign.config import Mesh
from jaxalign.models import model as model_module
from jaxalign.models.adapters.lora import LoraAdapters
from jaxalign.models.model import Model
from jaxalign.parallel.mesh import AXES
from jaxalign.parallel.sharding import make_sharding
from jaxalign.planner.hlo import collectives
from jaxalign.planner.hlo_text import parse
from jaxalign.planner.topology import parse_topology, topology_devices
from jaxalign.records import PackedBatch
from jaxalign.rollout.ring import decode_chunk
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.arguments import LmArguments
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.state import abstract_state
from tests.steps.batches import DECODER

OPTIMIZER = optax.adam(1e-3)
KERNELS = ("query", "key", "value", "out", "gate", "up", "down")


def found(lowered, model: Model, options=None):
    sizes = {axis: model.sharding.mesh.shape[axis] for axis in AXES}
    return collectives(parse(lowered.compile(options).as_text()), sizes, unknown_trips=31)


def update(model: Model, rows: int = 16, length: int = 16):
    """The collectives of one step of supervised fine-tuning."""

    def array(dtype):
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=model.sharding.batch)

    batch = PackedBatch(
        tokens=array(jnp.int32), loss_mask=array(jnp.float32), segment_ids=array(jnp.int32), positions=array(jnp.int32)
    )
    frozen = None if model.lora is None else model.base.abstract()
    given = LmArguments(model=model, optimizer=OPTIMIZER, batch=batch, frozen=frozen)
    return found(lm_step.lower(abstract_state(model, OPTIMIZER), given), model)


@functools.cache
def updated(mesh: Mesh):
    return update(Model(DECODER, sharding=make_sharding(mesh)))


def gathered(found, loop: bool) -> set[str]:
    """The names of the parameters that are gathered, in a loop over layers or outside."""
    return {one.weight for one in found if one.kind == "all-gather" and "params" in one.weight and bool(one.loop) == loop}


def test_fsdp_gathers_the_kernels_of_each_layer_inside_the_loop_over_layers():
    names = gathered(updated(Mesh(fsdp=8)), loop=True)
    assert {name.split("'")[-2] for name in names} >= set(KERNELS)
    assert all(one.axes == ("fsdp",) for one in updated(Mesh(fsdp=8)) if one.weight)


@pytest.mark.variants(1)
@pytest.mark.parametrize("mesh", [Mesh(fsdp=8), Mesh(data=8), Mesh(data=2, fsdp=2, tensor=2), Mesh(fsdp=2, context=4)], ids=str)
def test_the_gradient_of_the_head_is_not_sent_once_per_chunk(mesh):
    """The loop over chunks is the one whose number of iterations is decided at run time."""
    sums = [one for one in updated(mesh) if one.kind in ("all-reduce", "reduce-scatter")]
    table = 4 * DECODER.embed * DECODER.vocab // mesh.tensor
    assert max([one.result for one in sums if not one.certain], default=0) < table // 2
    assert max(one.result for one in sums if not one.loop) >= table // 8


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_gather_no_parameter_for_the_forward_or_the_backward_pass(zero):
    """Sharded updates are gathered once, after the update: 4 bytes per number of a kernel or a table."""
    every = [one for one in updated(Mesh(fsdp=8, zero=zero)) if one.kind == "all-gather"]
    assert not gathered(every, loop=True) and not gathered(every, loop=False)
    assert not [one for one in every if one.loop]
    split = [leaf for leaf in jax.tree.leaves(Model(DECODER).abstract()) if leaf.size > 1000]
    assert sum(one.result for one in every) == 4 * sum(leaf.size for leaf in split)


SAMPLING = [
    (Mesh(fsdp=8), "tensor"),  # Without a tensor axis, "whole" is the same.
    *((mesh, rules) for mesh in (Mesh(data=2, fsdp=2, tensor=2), Mesh(pipeline=2, context=2, tensor=2))
      for rules in ("tensor", "whole")),
]


@pytest.mark.parametrize(("mesh", "rules"), SAMPLING, ids=str)
def test_sampling_gathers_no_weights(mesh, rules):
    every = sampled(dataclasses.replace(mesh, generation=rules))
    assert not gathered(every, loop=True) and not gathered(every, loop=False)
    assert rules == "tensor" or {one.kind for one in every if one.loop} == {"all-reduce"}  # Have all rows ended?


def test_two_tiers_of_rows_send_no_more_than_one_tier():
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    one, two = sampled(mesh), sampled(mesh, ((1, 20), (1, 40)))
    assert sorted((x.kind, x.axes, x.loop) for x in one) == sorted((x.kind, x.axes, x.loop) for x in two)


def test_sampling_with_the_training_layout_gathers_weights_at_every_token():
    """The other rules avoid this communication."""
    every = sampled(Mesh(fsdp=8, generation="training"))
    assert {one.weight.split("'")[-2] for one in every if one.weight and one.loop > 1} >= set(KERNELS)


@functools.cache
def sampled(mesh: Mesh, layout=((1, 40),)):
    """The collectives of a chunk of 32 steps, with the layers in a scan as on a TPU. layout: for each tier, the number of
    groups of 8 rows and the number of slots."""
    model = Model(DECODER, sharding=make_sharding(mesh))
    params, own = model.generation_abstract(model.abstract()), model.generation
    lying = own.sharding.named((None, "batch"))
    variant, control = Sampling(1, (64,)).variant("threefry2x32"), jax.ShapeDtypeStruct((3,), jnp.int32)
    shape = (4 + variant.fields(1), 8 * sum(parts for parts, _ in layout))
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=lying)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "LAYERED", {})
        tiers = tuple(own.abstract_cache(8 * parts, slots) for parts, slots in layout)
        lowered = decode_chunk.lower(own, params, tiers, rows, control, variant, 32)
    return found(lowered, model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent")
def test_fsdp_scatters_the_gradients_on_a_tpu():
    """The CPU's compiler has no reduce-scatter: it reduces whole gradients and slices them."""
    pytest.importorskip("libtpu")
    devices = topology_devices(parse_topology("v5e:2x4"))
    decoder = dataclasses.replace(DECODER, embed=1024, head_dim=128, mlp=4096, vocab=1024, compute_dtype="bfloat16")
    every = update(Model(decoder, sharding=make_sharding(Mesh(fsdp=8), devices)), 8, 256)
    assert {one.axes for one in every if one.kind == "reduce-scatter"} == {("fsdp",)}
    assert gathered(every, loop=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent")
def test_adapters_reduce_no_more_activations_on_a_tensor_axis_than_the_base():
    """In a layer of the base, two products reduce the residual stream forward, one again in recomputation, and two backward.
    Adapters add their ranks to these. The CPU's compiler does not merge the reductions of a sum."""
    pytest.importorskip("libtpu")
    devices = topology_devices(parse_topology("v5e:2x4"))
    decoder = dataclasses.replace(DECODER, embed=1024, head_dim=128, mlp=4096, vocab=1024, compute_dtype="bfloat16")
    model = Model(decoder, sharding=make_sharding(Mesh(tensor=8), devices))
    residual = 8 * 256 * 1024 * 2  # Bytes of bfloat16 [B, T, D].
    for lora, ranks in ((None, 0), (LoraAdapters(rank=16, alpha=16.0, targets=("*",)), 16 * 10)):
        every = update(dataclasses.replace(model, lora=lora), 8, 256)
        reduced = sum(one.result for one in every if one.kind == "all-reduce" and one.times == decoder.layers)
        assert 4 * residual <= reduced <= 5 * residual + ranks * 8 * 256 * 2
