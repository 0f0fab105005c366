"""Collectives of compiled programs: small programs with bytes computed by hand, and texts as the TPU compiler writes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxalign.planner.hlo import collectives, replica_groups
from jaxalign.planner.hlo_text import parse, type_bytes
from jaxalign.planner.surprises import surprises

AXES = {"data": 2, "tensor": 4}


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()).reshape(2, 4), tuple(AXES))


def array(spec: P, *shape: int, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), spec))


def found(fn, *arrays, unknown_trips: int = 1):
    text = jax.jit(fn).lower(*arrays).compile().as_text()
    return collectives(parse(text), AXES, unknown_trips)


# x is float32 [16, 8], of which a device holds [8, 2]: 64 bytes.
@pytest.mark.parametrize(("kind", "fn", "out", "result", "axes", "wire"), [
    ("all-gather", lambda x: lax.all_gather(x, "tensor", axis=1, tiled=True), P("data"), 256, ("tensor",), 192),
    ("all-gather", lambda x: lax.all_gather(x, ("data", "tensor"), tiled=True), P(), 512, ("data", "tensor"), 448),
    ("all-reduce", lambda x: lax.psum(x, "data"), P(None, "tensor"), 64, ("data",), 64),
    ("all-reduce", lambda x: lax.psum(x, "tensor"), P("data"), 64, ("tensor",), 96),
    ("reduce-scatter", lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True), P("data", "tensor"), 32,
     ("data",), 32),
    ("all-to-all", lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True), P("data", "tensor"), 64, ("tensor",), 48),
    ("collective-permute", lambda x: lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)]), P("data", "tensor"), 64,
     ("tensor",), 64),
])
def test_each_kind_by_hand(kind, fn, out, result, axes, wire):
    mapped = jax.shard_map(fn, mesh=mesh(), in_specs=P("data", "tensor"), out_specs=out, check_vma=False)
    (one,) = found(mapped, array(P("data", "tensor"), 16, 8))
    assert (one.kind, one.operand, one.result, one.axes, one.times, one.wire) == (kind, 64, result, axes, 1, wire)
    assert one.group == np.prod([AXES[axis] for axis in axes])


def layers(params, x):
    def layer(carry, weight):
        return lax.with_sharding_constraint(jnp.tanh(carry @ weight), NamedSharding(mesh(), P("data"))), None

    return lax.scan(layer, x, params["w"])[0]


# Five weights of float32 [8, 8], of which a device holds [4, 2]; gathered over data each is [8, 2]: 64 bytes.
WEIGHTS, INPUT = (5, 8, 8), (16, 8)


def sharded():
    return {"w": array(P(None, "data", "tensor"), *WEIGHTS)}, array(P("data"), *INPUT)


def test_a_loop_counts_every_iteration_and_the_weight_is_named():
    gathered = {one.axes: one for one in found(layers, *sharded())}
    weight = gathered["data",]
    assert (weight.kind, weight.result, weight.times, weight.certain, weight.loop) == ("all-gather", 64, 5, True, 1)
    assert weight.weight == "params['w']" and weight.total == 5 * 32
    activation = gathered["tensor",]  # [8, 2] of a row's part becomes [8, 8].
    assert (activation.result, activation.times, activation.weight) == (256, 5, "")


def test_a_loop_of_unknown_length_counts_the_assumed_iterations():
    def decode(params, x):
        return lax.while_loop(lambda s: (s[0] < 7) & (s[1].sum() > 0), lambda s: (s[0] + 1, layers(params, s[1])), (0, x))

    every = found(decode, *sharded(), unknown_trips=6)
    (weight,) = (one for one in every if one.weight)
    assert (weight.times, weight.certain, weight.loop) == (30, False, 2)
    (warning,) = surprises("sampling", every, (), {}, {})
    assert warning.startswith("every token gathers weights") and "params['w']" in warning
    assert not surprises("update", every, (), {}, {})
    whole = {"w": array(P(None, None, "tensor"), *WEIGHTS)}
    assert not surprises("sampling", found(decode, whole, sharded()[1], unknown_trips=6), (), {}, {})


def test_a_value_computed_from_an_argument_is_not_named_as_the_argument():
    def fn(x):
        return lax.all_gather(jnp.sin(x), "tensor", axis=1, tiled=True)

    (one,) = found(jax.shard_map(fn, mesh=mesh(), in_specs=P("data", "tensor"), out_specs=P("data"), check_vma=False),
                   array(P("data", "tensor"), 16, 8))
    assert one.kind == "all-gather" and one.weight == ""


@pytest.mark.parametrize(("text", "groups"), [
    ("replica_groups={{0,1},{2,3}}, x", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[4], x", [[0, 1], [2, 3]]),
    ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
    ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), x", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, x", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", [[0, 1, 2, 3]]),
    ("replica_groups=mesh['a'=4] {'a':(2)2}, x", [[0, 1], [2, 3]]),
    ("replica_groups=mesh['a'=4] {'a':(1)2}, x", [[0, 2], [1, 3]]),
    ("replica_groups={}, x", [[0, 1, 2, 3, 4, 5, 6, 7]]),
])
def test_every_way_to_write_the_groups(text, groups):
    assert replica_groups(text, 8) == groups


@pytest.mark.parametrize(("text", "size"), [
    ("f32[16,1024]{1,0:T(8,128)}", 65536), ("bf16[3]", 6), ("pred[]", 1), ("s4[5]", 3), ("f8e4m3fn[2,2]", 4),
    ("(bf16[2]{0:T(128)(2,1)S(1)}, u32[], token[])", 8),
])
def test_bytes_of_a_type(text, size):
    assert type_bytes(text) == size


TPU = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%start (p: bf16[1,8]) -> (bf16[1,8], bf16[1,64], u32[]) {
  %p = bf16[1,8]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.1 = bf16[1,64]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={1}
  ROOT %c = (bf16[1,8], bf16[1,64], u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.1: bf16[1,8]) -> bf16[1,64] {
  %p.1 = bf16[1,8]{1,0} parameter(0)
  %gather.2 = bf16[1,64]{1,0} all-gather(%p.1), channel_id=3, replica_groups=[1,8]<=[8], dimensions={1}
  ROOT %c.1 = bf16[1,64]{1,0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (q: f32[64]) -> f32[16] {
  %q = f32[64]{0:T(128)} parameter(0)
  %reduced = f32[64]{0:T(128)} all-reduce(%q), channel_id=4, replica_groups=mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[16]{0:T(128)} dynamic-slice(%reduced, %zero), dynamic_slice_sizes={16}
}

%condition (s: (s32[], bf16[1,8], f32[64])) -> pred[] {
  %s = (s32[]{:T(128)}, bf16[1,8]{1,0}, f32[64]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %ten = s32[]{:T(128)} constant(10)
  ROOT %less = pred[]{:T(512)} compare(%i, %ten), direction=LT
}

%body (s.1: (s32[], bf16[1,8], f32[64])) -> (s32[], bf16[1,8], f32[64]) {
  %s.1 = (s32[]{:T(128)}, bf16[1,8]{1,0}, /*index=2*/f32[64]{0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i.1, %two)
  %w = bf16[1,8]{1,0} get-tuple-element(%s.1), index=1
  %begun = (bf16[1,8], bf16[1,64], u32[]) fusion(%w), kind=kCustom, calls=%start
  %ended = bf16[1,64]{1,0} fusion(%w), kind=kCustom, calls=%done
  %g = f32[64]{0} get-tuple-element(%s.1), index=2
  %scattered = f32[16]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="jit(f)/while/body/dot"}
  %cp = (f32[64], f32[64], u32[], u32[]) collective-permute-start(%g), channel_id=5, source_target_pairs={{0,4},{4,0}}
  %moved = f32[64]{0} collective-permute-done(%cp)
  ROOT %out = (s32[], bf16[1,8], f32[64]) tuple(%next, %w, %moved)
}

ENTRY %main (w.1: bf16[1,8], g.1: f32[64]) -> f32[64] {
  %w.1 = bf16[1,8]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %g.1 = f32[64]{0} parameter(1), metadata={op_name="g"}
  %first = s32[] constant(0)
  %copied = s32[] copy(%first)
  %made = (s32[], bf16[1,8], f32[64]) tuple(%copied, %w.1, %g.1)
  %loop = (s32[], bf16[1,8], f32[64]) while(%made), condition=%condition, body=%body
  %gather.7.remat = bf16[1,64]{1,0} all-gather(%w.1), channel_id=9, replica_groups=[1,8]<=[8], dimensions={1}
  %table = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
  %kernel = f32[64]{0} custom-call(%g.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %last = f32[64]{0} get-tuple-element(%loop), index=2
}
"""


def test_collectives_as_the_tpu_compiler_writes_them():
    """An asynchronous gather occurs twice and counts once; an all-reduce of which only a slice is used is a reduce-scatter; a
    loop from 0 to 10 in steps of 2 has 5 iterations; the start and the done of a permute count once."""
    by_kind = {(one.kind, one.loop): one for one in collectives(parse(TPU), AXES)}
    gather = by_kind["all-gather", 1]
    assert (gather.operand, gather.result, gather.times, gather.certain) == (16, 128, 5, True)
    assert gather.weight == "params['w']" and gather.axes == ("data", "tensor")
    scatter = by_kind["reduce-scatter", 1]
    assert (scatter.operand, scatter.result, scatter.axes, scatter.total) == (256, 64, ("tensor",), 5 * 192)
    assert scatter.op_name == "jit(f)/while/body/dot"
    permute = by_kind["collective-permute", 1]
    assert (permute.operand, permute.result, permute.axes, permute.times) == (256, 256, ("data",), 5)
    again = by_kind["all-gather", 0]
    assert again.rematerialised and again.times == 1 and len(by_kind) == 4
    (warning,) = surprises("update", [again], (), {}, {})
    assert warning.startswith("the compiler gathers weights a second time") and "params['w']" in warning


PEELED = """HloModule jit_f, is_scheduled=true

%body (c: (s32[], bf16[16,8], bf16[2,8])) -> (s32[], bf16[16,8], bf16[2,8]) {
  %c = (s32[], bf16[16,8]{1,0}, bf16[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w.1 = bf16[2,8]{1,0} get-tuple-element(%c), index=2
  %begun.1 = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%w.1), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %ended.1 = bf16[16,8]{1,0} all-gather-done(%begun.1)
  ROOT %t = (s32[], bf16[16,8]{1,0}, bf16[2,8]{1,0}) tuple(%next, %ended.1, %w.1)
}

%condition (d: (s32[], bf16[16,8], bf16[2,8])) -> pred[] {
  %d = (s32[], bf16[16,8]{1,0}, bf16[2,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %most = s32[] constant(3)
  ROOT %less = pred[] compare(%j, %most), direction=LT
}

ENTRY %main (w: bf16[2,8]) -> bf16[16,8] {
  %w = bf16[2,8]{1,0} parameter(0), metadata={op_name="params"}
  %zero = s32[] constant(0)
  %begun = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%w), channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
  %ended = bf16[16,8]{1,0} all-gather-done(%begun)
  %carry = (s32[], bf16[16,8]{1,0}, bf16[2,8]{1,0}) tuple(%zero, %ended, %w)
  %loop = (s32[], bf16[16,8]{1,0}, bf16[2,8]{1,0}) while(%carry), condition=%condition, body=%body
  ROOT %last = bf16[16,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_gather_that_the_gpu_compiler_peels_off_a_loop_is_executed_besides_those_in_the_loop():
    """Four gathers of 256 bytes over 8 devices send 4 x 224 bytes: one before the loop and three in it, with one channel."""
    gathers = collectives(parse(PEELED), AXES, gpu=True)
    assert sorted(one.times for one in gathers) == [1, 3] and sum(one.total for one in gathers) == 4 * 224


ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true

%slice (p: bf16[6,1,8], i: s32[]) -> bf16[1,1,8] {
  %p = bf16[6,1,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %one = bf16[1,1,8]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,1,8}
}

ENTRY %main (w: bf16[6,1,8], i.1: s32[]) -> bf16[8,8] {
  %w = bf16[6,1,8]{2,1,0} parameter(0), metadata={op_name="params"}
  %i.1 = s32[] parameter(1)
  %fusion-start = ((bf16[6,1,8]{2,1,0}, s32[]), bf16[1,1,8]{2,1,0}, u32[]) fusion-start(%w, %i.1), kind=kLoop, calls=%slice
  %fusion-done = bf16[1,1,8]{2,1,0} fusion-done(%fusion-start)
  %row = bf16[1,8]{1,0} bitcast(%fusion-done)
  %begun = ((bf16[1,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%row), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %ended = bf16[8,8]{1,0} all-gather-done(%begun)
}
"""


def test_a_fusion_that_the_gpu_compiler_starts_asynchronously_is_read_as_a_fusion():
    """As the compiler of jax 0.11.2 writes the slice of a layer before its gather."""
    module = parse(ASYNCHRONOUS)
    started = module.entry.instructions["fusion-start"]
    assert (started.opcode, started.bytes, module.callers["slice"][0][1].name) == ("fusion", 16, "fusion-start")
    (gather,) = collectives(module, AXES)
    assert (gather.weight, gather.operand, gather.result) == ("params", 16, 128)


def test_an_instruction_can_span_several_lines():
    """The text contains kernel settings and rows of constants."""
    entry = parse(TPU).entry
    assert entry.root.name == "last" and entry.instructions["kernel"].op_name == "jit(f)/kernel"
    assert entry.instructions["table"].bytes == 16


def test_a_computation_on_another_core_is_parsed_like_any_other():
    """A gather that a TPU runs on its sparse cores, in a separate thread."""
    module = parse("""HloModule jit_f

%inner (a: f32[8]) -> f32[64] {
  %a = f32[8]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%a), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}, execution_thread="sparsecore"

%outer (b: f32[8]) -> f32[64] {
  %b = f32[8]{0} parameter(0)
  ROOT %f = f32[64]{0} fusion(%b), kind=kCustom, calls=%inner
}, execution_thread="sparsecore"

ENTRY %main (c: f32[8]) -> f32[64] {
  %c = f32[8]{0} parameter(0), metadata={op_name="params"}
  %begun = ((f32[8]), f32[64], u32[]) async-start(%c), async_execution_thread="sparsecore", calls=%outer
  ROOT %ended = f32[64]{0} async-done(%begun)
}
""")
    assert list(module.computations) == ["inner", "outer", "main"]
    assert [len(one.instructions) for one in module.computations.values()] == [2, 2, 3]
    (one,) = collectives(module, AXES)
    assert (one.kind, one.times, one.axes) == ("all-gather", 1, ("data", "tensor"))


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        _ = parse("HloModule empty\n").entry


def test_a_large_replicated_array_is_reported():
    dtype = np.dtype(np.float32)
    arrays = [("params['a']", (1024, 8), dtype, NamedSharding(mesh(), P())),
              ("params['b']", (1024, 8), dtype, NamedSharding(mesh(), P("data"))),
              ("params['small']", (8,), dtype, NamedSharding(mesh(), P()))]
    (warning,) = surprises("update", (), arrays, {}, {}, large=32768)
    assert warning == "replicated on all 8 devices: params['a'] [1024, 8], 0.00 GB"
