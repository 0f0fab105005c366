"""Estimates the peak memory of each program on one device, from observations of the arrays that XLA keeps.

docs/plan.md explains each part. Dimension letters: B rows per device, T tokens of a row per device, S keys of a row, D model,
H query heads, K key/value heads, h head dim, F mlp, V vocab, L layers. H, K, F, V and L are per device.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxalign.models.model import Model, unrolls
from jaxalign.models.unstacked import copied_on_gpus
from jaxalign.parallel.pipeline import is_pipelined, micro_batches
from jaxalign.planner.weights import LANES, WeightBytes, split_ways
from jaxalign.rollout.layouts import prefill_sizes, slot_counts

GPU_GAPS = 1.05
"""The memory that the GPU compiler allocates for an update, over the bytes in use at its peak: its allocation leaves gaps."""

Parts = dict[str, float]
"""Bytes on one device, by kind of array."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The rows of one call: `rows` rows of `length` tokens over all devices, with `new` tokens sampled after each row."""

    rows: int
    length: int
    new: int = 0


@dataclasses.dataclass(frozen=True)
class Local:
    """One device's share of a model's sizes and of the rows of a call."""

    B: float
    T: float
    S: int
    D: int
    H: float
    K: float
    h: int
    F: float
    V: float
    L: float
    size: int  # bytes per number in the compute dtype
    kept: int  # bytes per number in the KV cache
    share: float  # the fraction of its tokens that a device stores between layers
    gated: bool
    attention: str  # "plain", "ring" or "fused"
    experts: bool
    output_read: bool  # whether the backward pass reads the output of the MLP: for a norm of it, or for DoRA's factors

    @property
    def tokens(self) -> float:
        return self.B * self.T


def local(model: Model, rows: BatchShape, phase: str = "training") -> Local:
    """One device's share of the sizes, in phase "training" or "generation"."""
    config, sharding = model.config, dataclasses.replace(model.sharding, phase=phase)
    ways = {name: split_ways(axes, sharding.mesh.shape) for name, axes in sharding.rules.items()}
    work = config.mlp if config.experts is None else config.mlp * config.experts.per_token
    return Local(
        max(1.0, rows.rows / ways["batch"]), rows.length / ways["length"], rows.length, config.embed,
        config.heads / ways["heads"], config.kv_heads / ways["kv_heads"], config.head_dim, work / ways["mlp"],
        config.table_rows / ways["vocab"], config.layers / ways["layers"], np.dtype(config.compute_dtype).itemsize,
        np.dtype(config.stored_dtype).itemsize,
        ways["length"] / ways["residual"], config.gated, attention_kind(model, rows, phase),
        config.experts is not None,
        config.sandwich_norms or not config.pre_norms or (model.lora is not None and model.lora.dora),
    )


def attention_kind(model: Model, rows: BatchShape, phase: str = "training") -> str:
    """The attention used for rows of this length: "plain", "ring" or "fused". `estimate.with_attention` has set the model's
    attention to "plain" if its platform has no kernel for the model."""
    if model.config.attention == "plain":
        return "plain"
    if phase == "training" and model.sharding.mesh.shape["context"] > 1:
        return "ring"
    return "fused" if rows.length >= LANES else "plain"


def scores(at: Local) -> float:
    """Bytes of one layer's attention scores, in float32 and after the softmax in the compute dtype: [B, H, T, S] for plain
    attention, and the keys of one device at a time for a ring. A fused kernel keeps one float32 per query."""
    if at.attention == "fused":
        return at.tokens * at.H * 4
    return at.B * at.H * at.T * (at.S if at.attention == "plain" else at.T) * (4 + at.size)


def layer_forward(at: Local) -> float:
    """Peak temporaries of a layer's forward pass: the larger of those of attention and of the MLP."""
    mlp = (3 if at.gated else 2) * at.tokens * at.F * at.size
    heads = at.tokens * 2 * (at.H + at.K) * at.h * at.size
    return 3 * at.tokens * at.D * at.size + max(scores(at) + heads, mlp)


def layer_backward(at: Local, adapted: bool = False) -> float:
    """Peak temporaries of a layer's backward pass: the MLP's products stay in memory during attention's backward pass.

    adapted: whether the model has adapters, whose products the GPU compiler stores beside those of the MLP.
    """
    kept = (2 if at.gated else 1) * at.tokens * at.F * at.size
    heads = at.tokens * 3 * (at.H + at.K) * at.h * at.size
    return 6 * at.tokens * at.D * at.size + kept + max(scores(at) + heads, (3 if adapted else 1) * kept)


def residuals(at: Local, remat: str) -> float:
    """Bytes of all layers' arrays that the forward pass keeps for the backward pass. remat: "" without rematerialisation;
    "nothing" to save only the layers' inputs; "products" to also save the products with weights."""
    if remat:
        mlp = 0 if at.experts else (2 if at.gated else 1) * at.F  # The products of experts are recomputed.
        outputs = at.D * (2 if at.output_read and mlp else 1)
        products = (at.H + 2 * at.K) * at.h + outputs + mlp if remat == "products" else 0
        return at.L * at.tokens * (at.share * at.D + products) * at.size
    if at.attention == "plain" and not at.experts:
        marked = at.D + (2 * at.H + 2 * at.K) * at.h + (2 if at.gated else 1) * at.F
        return at.L * at.tokens * (at.share * at.D + marked) * at.size
    norms = 6 * at.tokens * at.D * 4  # Three float32 arrays for each of two norms.
    mlp = (6 if at.gated else 4) * at.tokens * at.F * at.size
    heads = at.tokens * (2 * at.H + 2 * at.K) * at.h * at.size
    return at.L * (scores(at) + norms + mlp + heads + 3 * at.tokens * at.D * at.size)


def cache(at: Local, slots: int) -> float:
    """Bytes of the keys and values of all layers, with their scales if they are int8."""
    return 2 * at.L * at.B * at.K * slots * (at.h * at.kept + (4 if at.kept == 1 else 0))


def chunk(model: Model, rows: BatchShape) -> tuple[int, int]:
    """(positions of a row per device in one chunk of the LM head, number of chunks), as in `models/heads.py`."""
    parts = model.sharding.mesh.shape["context"]
    own = -(-rows.length // parts)
    positions = max(1, min(own, model.chunk_floats // max(1, rows.rows * model.config.vocab) // parts))
    return positions, -(-own // positions)


def update(model: Model, weights: WeightBytes, rows: BatchShape, micro: int, lm_head: bool, beside: float = 0.0,
           packed: bool = False, gpu: bool = False) -> Parts:
    """Temporaries of one update on a minibatch `rows`, computed in `micro` micro-batches.

    Args:
      beside: bytes of arrays of another model that is updated in the same program: casts and tables, and on TPUs gradients.
      packed: as in `programs.Task`.
      gpu: whether the devices are GPUs.

    XLA sets the gradients of the layers to zero before the head's backward pass if all weights are trained, and on GPUs
    also those of adapters. If all weights are trained, it stores the gradient of an untied head twice, but once for packed
    answers on GPUs unless another model is updated too. On GPUs it may set the gradient of the embeddings to zero before the
    layers' backward pass. In a loop over micro-batches, a GPU keeps a tied
    embedding transposed for the logits.
    """
    config = model.config
    part = BatchShape(max(1, rows.rows // micro), rows.length)
    at = local(model, part)
    kept = residuals(at, config.remat_saves if config.remat else "")
    layer = at  # A pipeline stage computes one micro-batch at a time, but keeps the residuals of all of them.
    if is_pipelined(model.sharding):
        layer = dataclasses.replace(at, B=at.B / micro_batches(model.sharding, part.rows))
    if model.lora is None and not config.remat and not model.sharding.keep_gathered:
        kept += weights.casts  # The cast weights that each layer used are also kept.
    # The head's backward pass runs first, before any gradient of this micro-batch exists. The layers follow; the embedding
    # lookup comes last.
    # Each entry of `times` is (gradients, casts and tables, everything else) at that point:
    looped, whole = micro > 1 or packed, weights.whole if model.sharding.keep_gathered else 0.0
    if is_pipelined(model.sharding):  # All layers are gathered at once, and then stored a second time, transposed.
        whole *= 2
    # With adapters and no LM head, a GPU reads embeddings from the stored table, if the table is not gathered.
    in_place = gpu and model.lora is not None and not lm_head and not _gathers(model)
    # Before a loop over micro-batches, a TPU gathers the table and the head for all of them.
    gathers = looped and not gpu and _gathers(model)
    hoisted = weights.table if (micro > 1 or gathers) and not in_place and not whole else 0.0
    if gathers and lm_head and not config.tie_embeddings and not whole:
        hoisted += weights.head
    casts = (whole or weights.casts + weights.copies[0] + hoisted) + beside
    turned = weights.head if gpu and lm_head and looped and config.tie_embeddings else 0.0  # Transposed before the loop.
    accumulated = weights.gradients if looped else 0.0
    layers = accumulated + weights.gradients - weights.table_gradient
    times = {
        "layers": (
            layers, casts, turned + kept + layer_backward(layer, gpu and model.lora is not None)
            + (0.0 if whole else 2 / 3 * weights.layer) + (weights.table if gpu and model.lora is None else 0.0)
        ),
        "lookup": (layers, casts, 2 * weights.table if model.lora is None else weights.copies[1]),
        # With zero < 3 each device updates its part of replicated parameters; the new ones are gathered next to the old.
        "step": (accumulated + weights.gradients, beside, 0.0 if model.sharding.zero == 3 else weights.parameters),
    }
    if lm_head:
        positions, _ = chunk(model, part)
        gradient = 4 / at.size * weights.head if model.lora is None else 0.0  # float32, before the reduce-scatter
        early = layers - accumulated if gpu or model.lora is None else 0.0
        twice = model.lora is None and not config.tie_embeddings and not (gpu and packed and not beside)
        heads = (2 if twice else 1) - bool(whole)
        times["head"] = (accumulated + early, casts, heads * weights.head + gradient + 3 * at.B * positions * at.V * 4 + kept)
    largest = max(times.values(), key=sum)
    if gpu:
        largest = [GPU_GAPS * size for size in largest]
    return dict(zip(("gradients", "casts", "activations"), largest, strict=True))


def _gathers(model: Model) -> bool:
    """Whether the table of embeddings is gathered before it is used."""
    return split_ways(model.sharding.rules["embed"], model.sharding.mesh.shape) > 1


def checks(model: Model, weights: WeightBytes, rows: BatchShape, parts: int, gpu: bool = False) -> Parts:
    """Temporaries of the checks of step 0 on `rows` (`rl.step_zero.checked_rows`): the gradients of all rows at once, and then
    beside them those of `parts` parts. On TPUs, XLA gives the layers' inputs of both computations memory of their own."""
    apart = update(model, weights, rows, parts, True, packed=True, gpu=gpu)
    apart["gradients"] += weights.gradients
    whole = update(model, weights, rows, 1, True, gpu=gpu)
    if not gpu:
        part = local(model, BatchShape(max(1, rows.rows // parts), rows.length))
        whole["activations"] += residuals(part, "nothing" if model.config.remat else "")
    return max(whole, apart, key=lambda sizes: sum(sizes.values()))


def scoring(models: list[tuple[Model, WeightBytes]], rows: BatchShape, counted: int, gpu: bool = False) -> Parts:
    """Temporaries of one program that runs several models forward over the same rows, with LM heads at `counted` positions.

    A loop computes the rows part by part. Before the loop, XLA gathers the weights that every iteration reads: all tables and
    heads, once if the models share a base.
    """
    at, first = local(models[0][0], rows), models[0][0]
    adapted = first.lora is not None
    held = 0.0 if adapted else sum(own.casts for _, own in models)
    each = models[:1] if adapted else models
    kept = sum(own.copies[0] + own.table for _, own in each)
    if gpu and counted and first.config.tie_embeddings and _gathers(first):
        kept += models[0][1].head  # The transposed copy. If the table is not gathered, this copy is counted as the table.
    if counted and not first.config.tie_embeddings:
        kept += sum(own.head for model, own in each if model.head != "scalar")
    layer = layer_forward(at) + max(own.layer for _, own in models) / 3
    beside = 0.0 if first.config.tie_embeddings else at.tokens * at.D * at.size
    return {"casts": held + kept, "activations": max(layer, models[0][1].copies[1]) + beside}


def generation(model: Model, weights: WeightBytes, rows: BatchShape, gpu_memory: float | None) -> Parts:
    """Temporaries of sampling: the ring cache, plus the largest of the temporaries of prefill, of widening the ring from half
    its size, and of decoding a chunk of tokens.

    To decode a chunk, a TPU copies the ring into a layout in which each token is contiguous and heads are padded to whole
    lanes, and the kernels of the keys if it has few of their heads. The copy takes more memory than widening the ring. A GPU
    transposes the embedding for the logits if it is tied, and copies the layers (`models.unstacked`).

    Weights are resharded before the ring is allocated, and the largest one exists twice. If weights keep the sharding of
    training, both tables are gathered once.

    gpu_memory: the memory of a GPU that programs may use, in bytes; None for TPUs.
    """
    at = local(model, rows, "generation")
    parts = model.sharding.generation.batch_size
    platform = "tpu" if gpu_memory is None else "gpu"
    count = prefill_sizes(rows.length, parts, max(1, rows.rows // parts), platform)[1] * parts
    entering = local(model, BatchShape(count, rows.length), "generation")
    whole, prompts = cache(at, slot_counts(rows.length + rows.new)[-1]), cache(entering, rows.length)
    layers = 0.0
    if gpu_memory is None:
        copy = whole * -(-at.h // LANES) * LANES / at.h + weights.padded
    else:
        copy, size = weights.head if model.config.tie_embeddings else 0.0, weights.generation_layers
        if unrolls(model.config.layers, "gpu") and copied_on_gpus(model.sharding.generation, size, gpu_memory):
            layers = size
    decoding = whole + copy + layers + 3 * at.B * at.V * 4
    others = max(whole + prompts + layer_forward(entering), 1.5 * whole, weights.moving)
    temporaries = {"KV cache": whole, "activations": max(decoding, others) - whole}
    if layers and decoding > others:
        temporaries |= {"activations": decoding - whole - layers, "copied layers": layers}
    if model.sharding.generation_rules == "training" and model.sharding.mesh.shape["fsdp"] > 1:
        temporaries["tables"] = weights.table + (0.0 if model.config.tie_embeddings else weights.head)
    return temporaries
