"""Kernels and overlapped collectives, in texts as the compilers for GPUs and TPUs write them."""

from __future__ import annotations

import pytest

from jaxalign.planner.hlo import collectives
from jaxalign.planner.hlo_text import parse
from jaxalign.planner.kernels import kernels

GPU = """HloModule jit_f, is_scheduled=true

%product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%add (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%p, %p)
}

ENTRY %main (x: f32[8,8]) -> f32[64,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %all-gather-start = (f32[8,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[1,8]<=[8]
  BETWEEN
  %all-gather-done = f32[64,8]{1,0} all-gather-done(%all-gather-start)
  %later = f32[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%product, backend_config={"kind":"__triton_gemm"}
  ROOT %last = f32[64,8]{1,0} copy(%all-gather-done)
}
"""
PRODUCT = ('%m = f32[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%product, '
           'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}')
CUBLAS = '%m = (f32[8,8]{1,0}, s8[16]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"'
CUDNN = '%m = (f32[8,8]{1,0}, u8[0]{0}) custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax"'
ADD = ('%m = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%add, backend_config={"fusion_backend_config":{"kind":"__triton"}}')


@pytest.mark.parametrize(("between", "overlaps", "kernel"), [
    (PRODUCT, True, {"Triton product": 2}), (CUBLAS, True, {"Triton product": 1, "cuBLAS": 1}),
    (CUDNN, True, {"Triton product": 1, "cuDNN attention": 1}), (ADD, False, {"Triton product": 1, "Triton": 1}),
    ("", False, {"Triton product": 1}),
])
def test_a_collective_overlaps_the_products_between_its_start_and_its_end(between, overlaps, kernel):
    """The product after the end does not count."""
    module = parse(GPU.replace("BETWEEN", between))
    (one,) = collectives(module, {"fsdp": 8})
    assert one.overlapped == overlaps and kernels(module) == kernel


TPU = """HloModule jit_f, is_scheduled=true

%start (p: bf16[1,8]) -> (bf16[1,8], bf16[1,64], u32[]) {
  %p = bf16[1,8]{1,0} parameter(0)
  %gather.1 = bf16[1,64]{1,0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={1}
  ROOT %c = (bf16[1,8], bf16[1,64], u32[]) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (p.1: bf16[1,8]) -> bf16[1,64] {
  %p.1 = bf16[1,8]{1,0} parameter(0)
  %gather.2 = bf16[1,64]{1,0} all-gather(%p.1), channel_id=3, replica_groups=[1,8]<=[8], dimensions={1}
  ROOT %c.1 = bf16[1,64]{1,0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: bf16[1,8]) -> bf16[1,64] {
  %w = bf16[1,8]{1,0} parameter(0)
  %begun = (bf16[1,8], bf16[1,64], u32[]) fusion(%w), kind=kCustom, calls=%start
  BETWEEN
  ROOT %ended = bf16[1,64]{1,0} fusion(%w), kind=kCustom, calls=%done
}
"""


@pytest.mark.parametrize(("between", "kernel"), [
    ("", {}),
    ('%k = f32[64]{0} custom-call(%w), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/splash_mha_fwd"}',
     {"splash attention": 1}),
])
def test_an_asynchronous_collective_as_the_tpu_compiler_writes_it(between, kernel):
    module = parse(TPU.replace("BETWEEN", between))
    (one,) = collectives(module, {"fsdp": 8})
    assert one.overlapped == bool(kernel) and kernels(module) == kernel
