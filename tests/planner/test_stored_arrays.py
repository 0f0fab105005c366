"""float32 copies of bfloat16 weights, and logits of all tokens, in the text of compiled programs."""

from __future__ import annotations

import pytest

from jaxalign.planner.hlo_text import parse
from jaxalign.planner.stored_arrays import copied_in_loops, float32_copies, whole_logits
from jaxalign.planner.surprises import surprises

# Two layers of bf16 [1024, 512] are sliced, cast and multiplied in a loop. The slice and the cast are a fused computation.
LOOP = """
HloModule jit_step

%cast (layers: bf16[2,1024,512], index: s32[]) -> f32[1024,512] {
  %layers = bf16[2,1024,512]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,1024,512]{2,1,0} dynamic-slice(%layers, %index, %zero, %zero), dynamic_slice_sizes={1,1024,512}
  %flat = bf16[1024,512]{1,0} bitcast(%slice)
  ROOT %wide = f32[1024,512]{1,0} convert(%flat)
}

%body (carry: (s32[], f32[512,1024], bf16[2,1024,512])) -> (s32[], f32[512,1024], bf16[2,1024,512]) {
  %carry = (s32[], f32[512,1024]{1,0}, bf16[2,1024,512]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[512,1024]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[2,1024,512]{2,1,0} get-tuple-element(%carry), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %layer = f32[1024,512]{1,0} fusion(%w, %i), kind=kLoop, calls=%cast
  %y = f32[512,1024]{1,0} custom-call(%x, %layer), custom_call_target="__cublas$gemm"
  ROOT %out = (s32[], f32[512,1024]{1,0}, bf16[2,1024,512]{2,1,0}) tuple(%next, %y, %w)
}

%condition (carry.1: (s32[], f32[512,1024], bf16[2,1024,512])) -> pred[] {
  %carry.1 = (s32[], f32[512,1024]{1,0}, bf16[2,1024,512]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %two = s32[] constant(2)
  ROOT %less = pred[] compare(%i.1, %two), direction=LT
}

ENTRY %main (params: bf16[2,1024,512], rows: f32[512,1024]) -> f32[512,1024] {
  %params = bf16[2,1024,512]{2,1,0} parameter(0), metadata={op_name="arguments.params['up']"}
  %rows = f32[512,1024]{1,0} parameter(1), metadata={op_name="rows"}
  %start = s32[] constant(0)
  %first = (s32[], f32[512,1024]{1,0}, bf16[2,1024,512]{2,1,0}) tuple(%start, %rows, %params)
  %loop = (s32[], f32[512,1024]{1,0}, bf16[2,1024,512]{2,1,0}) while(%first), condition=%condition, body=%body
  ROOT %last = f32[512,1024]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_layer_that_is_stored_in_float32_is_found_with_its_argument():
    assert float32_copies(parse(LOOP)) == {"params['up']": 1024 * 512 * 4}


def test_copies_of_a_stack_in_a_loop_are_counted_in_every_iteration_and_slices_in_a_product_are_not():
    assert copied_in_loops(parse(LOOP)) == {"params['up']": 2 * 1024 * 512 * 4}
    narrow = LOOP.replace("ROOT %wide = f32[1024,512]{1,0} convert(%flat)", "ROOT %wide = bf16[1024,512]{1,0} copy(%flat)")
    assert copied_in_loops(parse(narrow)) == {"params['up']": 2 * 1024 * 512 * 2}
    product = LOOP.replace("f32[1024,512]{1,0} convert(%flat)", "f32[1024,512]{1,0} dot(%flat, %flat)")
    assert copied_in_loops(parse(product)) == {}
    (warning,) = surprises("sampling", (), (), {}, {"params['up']": 3_000_000_000, "params['gate']": 1_000_000_000})
    assert warning.startswith("every token copies 4.00 GB of weights before it multiplies them: params['up'], params['gate'];")
    assert not surprises("update", (), (), {}, {"params['up']": 3_000_000_000})
    prefetched = LOOP.replace("%layer = f32[1024,512]{1,0} fusion(", "%layer = f32[1024,512]{1,0:T(8,128)S(1)} fusion(")
    assert prefetched != LOOP and copied_in_loops(parse(prefetched)) == {}
    started = LOOP.replace("fusion(%w, %i), kind=kLoop, calls=%cast", "async-start(), calls=%cast")
    assert copied_in_loops(parse(started)) == {}  # An asynchronous call without operands, as TPUs have.
    outside = LOOP.replace("  ROOT %last", "  %other = bf16[2,1024,512]{2,1,0} copy(%params)\n  ROOT %last")
    assert copied_in_loops(parse(outside)) == copied_in_loops(parse(LOOP))


@pytest.mark.parametrize("changed", [
    LOOP.replace("ROOT %wide = f32[1024,512]{1,0} convert(%flat)", "ROOT %wide = f32[1024,512]{1,0} exponential(%flat)"),
    LOOP.replace("bf16[", "f32["),
    LOOP.replace("1024,512", "128,512"),  # a quarter of a MiB
])
def test_a_computed_array_a_float32_weight_and_a_small_weight_are_not_copies(changed):
    assert float32_copies(parse(changed)) == {}


def test_one_of_several_results_of_a_fused_computation_is_found():
    several = LOOP.replace("-> f32[1024,512] {", "-> (f32[1024,512], f32[1024,512]) {").replace(
        "ROOT %wide = f32[1024,512]{1,0} convert(%flat)",
        "%wide = f32[1024,512]{1,0} convert(%flat)\n"
        "  ROOT %both = (f32[1024,512]{1,0}, f32[1024,512]{1,0}) tuple(%wide, %wide)",
    ).replace("%layer = f32[1024,512]{1,0} fusion", "%layer = (f32[1024,512]{1,0}, f32[1024,512]{1,0}) fusion")
    assert float32_copies(parse(several)) == {"params['up']": 1024 * 512 * 4}


def test_weights_that_are_concatenated_in_float32_count_one_by_one():
    both = LOOP.replace("-> f32[1024,512] {", "-> f32[1024,1024] {").replace(
        "ROOT %wide = f32[1024,512]{1,0} convert(%flat)",
        "%wide = f32[1024,512]{1,0} convert(%flat)\n"
        "  %other = f32[1024,512]{1,0} exponential(%wide)\n"
        "  ROOT %both = f32[1024,1024]{1,0} concatenate(%wide, %other), dimensions={1}",
    ).replace("%layer = f32[1024,512]{1,0} fusion", "%layer = f32[1024,1024]{1,0} fusion")
    assert float32_copies(parse(both)) == {"params['up']": 1024 * 512 * 4}


GATHERED = """
HloModule jit_step

ENTRY %main (first: bf16[128,1024], second: bf16[128,2048]) -> f32[1024,2048] {
  %first = bf16[128,1024]{1,0} parameter(0), metadata={op_name="params['first']"}
  %second = bf16[128,2048]{1,0} parameter(1), metadata={op_name="params['second']"}
  %start = ((bf16[128,1024]{1,0}, bf16[128,2048]{1,0}), (bf16[1024,1024]{1,0}, bf16[1024,2048]{1,0})) all-gather-start(%first, %second), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %done = (bf16[1024,1024]{1,0}, bf16[1024,2048]{1,0}) all-gather-done(%start)
  %whole = bf16[1024,2048]{1,0} get-tuple-element(%done), index=1
  ROOT %wide = f32[1024,2048]{1,0} convert(%whole)
}
"""  # noqa: E501


def test_one_of_several_weights_that_are_gathered_together_is_found():
    assert float32_copies(parse(GATHERED)) == {"params['second']": 1024 * 2048 * 4}


def test_a_copy_is_a_warning_with_its_size():
    (warning,) = surprises("update", (), (), float32_copies(parse(LOOP)), {})
    assert warning == ("the program stores bfloat16 weights in float32: params['up'], 0.00 GB; computing in bfloat16 "
                       "(model.compute_dtype) needs no copy")


LOGITS = """
HloModule jit_step

ENTRY %main (hidden: bf16[768,64], head: bf16[64,1000], rows: f32[128,1000]) -> f32[768,1000] {
  %hidden = bf16[768,64]{1,0} parameter(0)
  %head = bf16[64,1000]{1,0} parameter(1)
  %rows = f32[128,1000]{1,0} parameter(2)
  ROOT %logits = f32[768,1000]{1,0} dot(%hidden, %head), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_the_logits_of_all_768_tokens_are_found_and_those_of_128_are_not():
    assert whole_logits(parse(LOGITS), vocabulary=1000, tokens=768, hidden=64) == ["f32[768,1000]"]
    assert whole_logits(parse(LOGITS), vocabulary=1000, tokens=769, hidden=64) == []
    assert whole_logits(parse(LOGITS), vocabulary=1000, tokens=64, hidden=64) == ["f32[128,1000]", "f32[768,1000]"]
