"""Memory and work of programs, compared with hand calculations."""

from __future__ import annotations

import dataclasses

import pytest
from planner.planned import model

from jaxalign.models.adapters.lora import join
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.unstacked import layer_bytes
from jaxalign.planner import memory, work
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.programs import Task
from jaxalign.planner.weights import measure

KERNELS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


def plainly(made):
    return dataclasses.replace(made, config=dataclasses.replace(made.config, attention="plain"))


def task(rows: BatchShape, counted: int = 0, micro: int = 1) -> Task:
    return Task("ppo", "update", ("policy",), rows, 1, ("policy",), counted, ("policy",), micro)


def test_a_token_of_llama_8b_takes_131072_bytes_of_cache():
    at = memory.local(model(), BatchShape(1, 1000), "generation")
    assert memory.cache(at, 1000) == 131072 * 1000


def test_tensor_splits_the_cache_by_heads_and_all_other_axes_split_the_rows():
    at = memory.local(model(data=2, fsdp=2, tensor=4), BatchShape(8, 1000), "generation")
    assert memory.cache(at, 1000) == 131072 * 1000 * 2 / 4
    whole = memory.local(model(fsdp=2, tensor=4, generation="whole"), BatchShape(8, 1000), "generation")
    assert memory.cache(whole, 1000) == 131072 * 1000


def test_plain_attention_keeps_float32_scores_and_a_bfloat16_softmax_and_a_kernel_one_number_per_query():
    rows = BatchShape(4, 512)
    assert memory.scores(memory.local(plainly(model(fsdp=2, tensor=4)), rows)) == 2 * (32 / 4) * 512 * 512 * (4 + 2)
    assert memory.scores(memory.local(model(fsdp=2, tensor=4), rows)) == 2 * (32 / 4) * 512 * 4
    ring = memory.local(model(context=4), rows)
    assert ring.attention == "ring" and memory.scores(ring) == 4 * 32 * 128 * 128 * (4 + 2)
    assert memory.local(model(), BatchShape(4, 127)).attention == "plain"


def test_remat_keeps_only_the_inputs_of_layers():
    at = memory.local(model(fsdp=2), BatchShape(4, 512))
    assert memory.residuals(at, "nothing") == 32 * 2 * 512 * 4096 * 2
    # The products of a layer: queries, keys and values, output of attention, gate and up.
    beside = 4096 + 2 * 1024 + 4096 + 2 * 14336
    assert memory.residuals(at, "products") == 32 * 2 * 512 * (4096 + beside) * 2
    assert memory.residuals(at, "") > memory.residuals(at, "products")
    made = model(fsdp=2)
    for norms in ({"sandwich_norms": True}, {"pre_norms": False}):  # A norm reads the output of the MLP too.
        normed = dataclasses.replace(made, config=dataclasses.replace(made.config, **norms))
        at = memory.local(normed, BatchShape(4, 512))
        assert memory.residuals(at, "products") == 32 * 2 * 512 * (4096 + beside + 4096) * 2


def test_context_splits_the_tokens_of_a_row_and_sequence_parallelism_the_activations_between_layers():
    both = memory.local(model(context=2, tensor=4, sequence_parallel=True), BatchShape(1, 4096))
    assert (both.T, both.S, both.share) == (2048, 4096, 1 / 4)


def test_two_micro_batches_hold_two_sets_of_gradients_and_half_the_activations():
    at, own = model(fsdp=8), measure(model(fsdp=8), "float32")
    one, two = (memory.update(at, own, BatchShape(64, 2048), micro, lm_head=False) for micro in (1, 2))
    # The embedding's gradients come last, when the activations of the layers are freed.
    assert one["gradients"] == own.gradients - 4 * 128256 * 4096 / 8 and two["gradients"] == one["gradients"] + own.gradients
    # The weights of one layer are the same in both.
    assert two["activations"] - 2 / 3 * own.layer == pytest.approx((one["activations"] - 2 / 3 * own.layer) / 2)


def test_the_chunks_of_the_head_are_those_of_the_model():
    assert memory.chunk(model(), BatchShape(1, 512)) == (32, 16)  # 2 ** 22 // 128256 positions
    assert memory.chunk(model(), BatchShape(64, 512)) == (1, 512)
    assert memory.chunk(model(fsdp=16), BatchShape(64, 512)) == (8, 64)  # Capacity is per device.


def test_forward_is_two_operations_per_parameter_and_token_plus_attention_and_head():
    own = measure(model(), "float32")
    tokens, T = 4 * 1024, 1024
    attention = 4 * T * 32 * 128 * 32
    assert work.forward_flops(plainly(model()), own, BatchShape(4, T), 0) == tokens * (2 * KERNELS + attention)
    # A kernel skips positions that no query sees.
    assert work.forward_flops(model(), own, BatchShape(4, T), 0) == tokens * (2 * KERNELS + attention / 2)
    assert work.forward_flops(model(), own, BatchShape(4, T), T) - work.forward_flops(model(), own, BatchShape(4, T), 0) == (
        2 * 4096 * 128256 * tokens
    )


def test_backward_costs_two_forwards_and_one_for_frozen_kernels_and_remat_one_more():
    rows, plain = BatchShape(4, 1024), dataclasses.replace(model(), config=dataclasses.replace(model().config, remat=False))
    own = measure(plain, "float32")
    forward = work.forward_flops(plain, own, rows, 0)
    assert work.backward_flops(plain, own, rows, 0) == 2 * forward
    assert work.backward_flops(model(), own, rows, 0) == 3 * forward
    adapted = model(rank=16)
    few = measure(adapted, "bfloat16")
    attention = 4 * 1024 * 32 * 128 * 32 * 4 * 1024 / 2
    kernels = 2 * few.matmul * 4 * 1024
    assert work.backward_flops(adapted, few, rows, 0) == kernels + 2 * attention + kernels + attention


def test_fsdp_gathers_the_layers_forward_and_backward_and_the_embedding_once_and_scatters_the_gradients():
    """With remat too: the compilers share the gathers of the backward pass and of the forward pass that it repeats."""
    at = model(fsdp=16)
    own = measure(at, "float32")
    sent = work.update(at, own, task(BatchShape(16, 1024)), 1).sent["fsdp"]
    share, learnt = 15 / 16, 2 * own.count
    assert sent == pytest.approx(share * (2 * 2 * KERNELS + 2 * 128256 * 4096 + learnt))


def test_the_head_is_gathered_once_and_its_gradient_is_sent_with_the_others():
    """1024 positions in 32 chunks: besides the gradients of the step, they send only the head, in bfloat16."""
    at = model(fsdp=16)
    own = measure(at, "float32")
    with_head, without = (work.update(at, own, task(BatchShape(16, 1024), n), 1).sent["fsdp"] for n in (1024, 0))
    assert with_head - without == pytest.approx(15 / 16 * 128256 * 4096 * 2)


@pytest.mark.parametrize(("changes", "each"), [
    ({}, 5), ({"remat_saves": "products"}, 4), ({"remat": False}, 4), ({"sandwich_norms": True}, 6),
], ids=["remat", "products", "all stored", "norm of the output"])
def test_tensor_reduces_what_each_layer_computes_the_embeddings_and_the_gradient_of_the_head(changes, each):
    """As in programs compiled for v5e:4x4 and h100:1x8. A layer has two outputs and two inputs. It computes the output of
    attention twice with remat, and that of the MLP if a norm reads it."""
    at = model(tensor=8)
    at = dataclasses.replace(at, config=dataclasses.replace(at.config, **changes))
    own, rows, one = measure(at, "float32"), BatchShape(2, 1024), 2 * (2 * 1024 * 4096 * 2) * 7 / 8
    assert work.update(at, own, task(rows), 1).sent == {"tensor": (32 * each + 1) * one}
    # The gradient of the head's input is float32.
    assert work.update(at, own, task(rows, 1024), 1).sent == {"tensor": (32 * each + 3) * one}
    assert work.forward(at, own, task(rows, 1024)).sent == {"tensor": (32 * 2 + 1) * one}


def test_data_reduces_the_gradient_shards_of_fsdp_and_slices_reduce_the_shards_of_data():
    at = model(data=4, fsdp=2)
    own = measure(at, "float32")
    sent = work.update(at, own, task(BatchShape(8, 64)), 2).sent
    shard = 2 * own.count / 2
    assert sent["data"] == pytest.approx(2 * shard / 2)
    assert sent["slices"] == pytest.approx(2 * (shard / 2) / 2)


def test_decoding_reads_all_weights_and_the_cache_for_every_token():
    at = model(tensor=4)
    own = measure(at, "float32")
    generate = Task("ppo", "generate", ("policy",), BatchShape(8, 512, 256), 1, ("policy",), 1)
    _, _, step = work.generate(at, own, generate)
    assert step.hbm == own.generation + 131072 * 768 * 8 / 4
    assert step.flops == 8 * (2 * KERNELS + 4 * 768 * 32 * 128 * 32 + 2 * 4096 * 128256) / 4


def test_sampling_holds_a_second_ring_with_heads_padded_to_whole_lanes():
    """Llama-3.2-1B has heads of width 64, so the copy is twice the ring: 32 rows of 768 tokens, 32,768 bytes each."""
    small = model("Llama-3.2-1B", rank=16)
    ring = 32 * 768 * 32768
    found = memory.generation(small, measure(small, "bfloat16"), BatchShape(32, 512, 256), None)
    assert found["KV cache"] == ring and found["activations"] == 2 * ring + 3 * 32 * 128256 * 4


@pytest.mark.parametrize(("memory_of_gpu", "copied"), [(8 << 30, True), ((8 << 30) - 1, False)])
def test_a_gpu_copies_the_layers_to_sample_if_they_take_at_most_a_quarter_of_its_memory(memory_of_gpu, copied):
    """Llama-3.2-1B: 16 layers of 60,821,504 parameters in bfloat16 and 44,032 * 16 adapter parameters in float32: 1.99 GB, a
    quarter of 7.42 GiB."""
    small = model("Llama-3.2-1B", rank=16)
    found = memory.generation(small, measure(small, "bfloat16"), BatchShape(32, 512, 256), memory_of_gpu)
    head = 2048 * 128256 * 2  # Tied, so transposed.
    assert found["activations"] == head + 3 * 32 * 128256 * 4
    assert found.get("copied layers", 0) == copied * 16 * (60821504 * 2 + 44032 * 16 * 4)


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "tensor": 4}])
def test_plan_and_run_decide_about_the_copied_layers_by_the_same_bytes(stored, mesh):
    """Up to the norms, which the run counts in float32, and padding of the blocks of NF4."""
    made = model("Llama-3.2-1B", rank=16, **mesh)
    base = made.base.abstract()
    params = made.generation_abstract(join(quantise_abstract(base, stored), made.abstract()))
    assert measure(made, stored).generation_layers == pytest.approx(layer_bytes(made.generation, params), rel=0.01)


@pytest.mark.parametrize(("shape", "rank", "profiled"), [
    ("Llama-3.2-1B", 16, 777 - 112), ("Llama-3.2-1B", 0, 427 - 112), ("Llama-3.1-8B", 16, 1512 - 224),
    ("Qwen3-0.6B", 16, 1357 - 196),
])
def test_the_kernels_of_a_decoding_step_are_about_those_of_a_profile(shape, rank, profiled):
    """Profiles of an H200 (docs/gpus.md), without the copies of weights."""
    assert work.decoding_kernels(model(shape, rank=rank)) == pytest.approx(profiled, rel=0.05)


def test_the_largest_weight_that_is_moved_is_held_twice():
    """Llama-3.1-70B over tensor 8: the gates of 80 layers in bfloat16, more than the ring of 64 rows."""
    large = model("Llama-3.1-70B", rank=16, fsdp=8, tensor=8)
    own = measure(large, "bfloat16")
    assert own.moving == 80 * 8192 * 28672 * 2 / 8
    assert sum(memory.generation(large, own, BatchShape(64, 512, 256), None).values()) == own.moving
    assert measure(model("Llama-3.1-70B", rank=16, tensor=8), "bfloat16").moving == 0
