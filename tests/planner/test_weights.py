"""Bytes of weights against numbers computed by hand from published sizes."""

from __future__ import annotations

import pytest
from planner.planned import model

from jaxalign.planner.weights import measure

# Llama-3.1-8B: D 4096, H 32, K 8, h 128, F 14336, V 128256, L 32.
KERNELS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
TABLE = 128256 * 4096
NORMS = (2 * 32 + 1) * 4096
ALL = KERNELS + 2 * TABLE + NORMS


def test_parameters_of_the_published_model():
    found = measure(model(), "float32")
    assert found.count == found.trained == ALL == 8_030_261_248
    assert found.matmul == KERNELS
    assert measure(model("Qwen3-0.6B"), "float32").count == 596_049_920


def test_training_holds_four_bytes_per_parameter_and_eight_for_its_moments_split_over_fsdp():
    whole, split = measure(model(), "float32"), measure(model(fsdp=16), "float32")
    assert (whole.parameters, whole.gradients, whole.optimizer["adamw"]) == (4 * ALL, 4 * ALL, 8 * ALL)
    # Norms are replicated.
    assert split.parameters == 4 * ((ALL - NORMS) / 16 + NORMS)
    assert split.optimizer["adamw"] == 2 * split.parameters


@pytest.mark.parametrize(("zero", "parameters", "gradients", "optimizer"), [(3, 16, 16, 16), (2, 1, 16, 16), (1, 1, 1, 16)])
def test_config_mesh_zero_selects_the_split_arrays(zero, parameters, gradients, optimizer):
    found = measure(model(fsdp=16, zero=zero), "float32")

    def of(ways):
        return (ALL - NORMS) / ways + NORMS

    assert (found.parameters, found.gradients) == (4 * of(parameters), 4 * of(gradients))
    assert found.optimizer["adamw"] == 8 * of(optimizer)


def test_each_optimizer_has_its_own_state():
    found = measure(model(), "float32").optimizer
    assert found["lion"] == 4 * ALL and found["muon"] == 4 * KERNELS + 8 * (2 * TABLE + NORMS)
    assert found["adafactor"] < 0.03 * found["adamw"]


def test_gathered_weights_are_in_the_compute_dtype_and_split_over_tensor_only():
    found = measure(model(fsdp=4, tensor=4), "float32")
    assert found.table == found.head == 2 * TABLE / 4
    assert found.layer == 2 * KERNELS / 32 / 4
    assert found.casts == 2 * KERNELS / 16


def test_generation_reads_weights_as_config_mesh_generation_says():
    for generation, ways in (("tensor", 4), ("training", 16), ("whole", 1)):
        found = measure(model(fsdp=4, tensor=4, generation=generation), "float32").generation
        assert found == 2 * ((ALL - NORMS) / ways + NORMS)


def test_only_adapters_are_trained_and_the_base_stays_in_its_stored_dtype():
    rank = 16
    # a [in, r] and b [r, out] of each of the seven linear layers.
    adapters = 32 * rank * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    for base, bytes_of_kernels in (("float32", 4), ("bfloat16", 2), ("nf4", 0.5 + 4 / 64)):
        found = measure(model(rank=rank), base)
        tables = 4 if base == "float32" else 2
        assert found.trained == adapters and found.optimizer["adamw"] == 8 * adapters
        assert found.frozen == KERNELS * bytes_of_kernels + 2 * TABLE * tables + NORMS * 4
    eight = measure(model(rank=rank), "int8").frozen
    scales = 4 * 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert eight == KERNELS + scales + 2 * TABLE * 2 + NORMS * 4


def test_a_scalar_head_replaces_the_lm_head():
    assert measure(model(head="scalar"), "float32").count == ALL - TABLE + 4096


def test_a_base_already_in_the_layout_of_sampling_is_not_moved():
    assert measure(model(rank=16), "bfloat16").moved == 0
    assert measure(model(rank=16, fsdp=4), "bfloat16").moved > 0
    assert measure(model(rank=16, fsdp=4, generation="training"), "bfloat16").moved == 0
    assert measure(model(), "float32").moved == 2 * ALL


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_weights_already_in_the_layout_of_sampling_are_not_moved(kind):
    assert measure(model(), kind, frozen=True).moved == 0
    assert measure(model(tensor=8), kind, frozen=True).moved == 0
    assert measure(model(fsdp=4), kind, frozen=True).moved > 0


def test_a_judge_is_stored_and_sampled_in_its_own_format():
    """Its kernels have 1 byte per number and a float32 scale per output, its tables 2 bytes and its norms 4."""
    whole, split = (measure(model("Llama-3.1-70B", **mesh), "int8", frozen=True) for mesh in ({}, {"fsdp": 4, "tensor": 4}))
    kernels, tables = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672), 2 * 128256 * 8192
    scales, norms = 4 * 80 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192 - 8192), 4 * (2 * 80 + 1) * 8192
    assert whole.count == kernels + tables + norms / 4
    assert whole.parameters == pytest.approx(kernels + 2 * tables + scales + norms, rel=1e-3)
    assert split.parameters == pytest.approx(whole.parameters / 16, rel=0.01)
    assert split.generation == pytest.approx(whole.parameters / 4, rel=0.01)


def test_a_gpu_transposes_the_kernels_of_all_layers_that_are_split_over_their_last_axis():
    """The output of attention [32, 128, 4096] and the second matrix of the MLP [14336, 4096] of each of 32 layers."""
    last = 32 * (4096 + 14336) * 4096
    adapted = model(rank=16, fsdp=4, tensor=4)
    assert measure(adapted, "bfloat16").transposed == 2 * last / 16
    assert measure(adapted, "int8").transposed == measure(model(fsdp=4), "float32").transposed == 0  # quantised; cast
    assert measure(model(rank=16, tensor=4), "bfloat16").transposed == 0  # not split over the model width


def test_a_tpu_pads_the_2_heads_of_the_keys_on_a_device_to_8():
    padded = 2 * 32 * 4096 * 8 * 128
    assert measure(model(rank=16, fsdp=4, tensor=4), "bfloat16").padded == padded
    assert measure(model(rank=16, fsdp=16), "bfloat16").padded == 0  # 8 heads
    assert measure(model(rank=16, fsdp=4, tensor=4), "nf4").padded == 0
