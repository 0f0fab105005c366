"""The work of a task: floating-point operations, bytes read and written in device memory, and bytes sent over each mesh axis.

All figures are for one device and one call, unless noted. Dimension letters are those of `memory.py`.
"""

from __future__ import annotations

import dataclasses

from jaxalign.models.model import Model
from jaxalign.planner import memory
from jaxalign.planner.memory import BatchShape, Local
from jaxalign.planner.network import gathered, reduced
from jaxalign.planner.programs import Task
from jaxalign.planner.weights import WeightBytes, split_ways
from jaxalign.rollout.layouts import slot_counts


@dataclasses.dataclass(frozen=True)
class Work:
    """flops: floating-point operations; hbm: bytes read or written; sent: bytes by mesh axis ("slices": between slices);
    kernels: GPU kernels, counted only for decoding, where they are small; early: the bytes that are sent over fsdp before
    anything is computed, which `sent` includes."""

    flops: float = 0.0
    hbm: float = 0.0
    sent: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: float = 0.0
    early: float = 0.0

    def __add__(self, other: Work) -> Work:
        axes = dict.fromkeys((*self.sent, *other.sent))
        sent = {axis: self.sent.get(axis, 0.0) + other.sent.get(axis, 0.0) for axis in axes}
        kernels, early = self.kernels + other.kernels, self.early + other.early
        return Work(self.flops + other.flops, self.hbm + other.hbm, sent, kernels, early)

    def __mul__(self, times: float) -> Work:
        sent = {axis: size * times for axis, size in self.sent.items()}
        return Work(self.flops * times, self.hbm * times, sent, self.kernels * times, self.early * times)


KERNEL_SECONDS = 1.9e-6
"""Seconds that a kernel of a decoding step adds on an H200 to the time of reading weights and caches at 80% of the bandwidth:
1.8 to 2.3 us for layers that XLA's Triton kernels read (docs/gpus.md)."""
LAYER_KERNELS, ADAPTER_KERNELS = 19, 3
"""Kernels of a decoding step for each layer and each adapter, without copies and conversions of weights (docs/gpus.md)."""
_SUPERVISED = ("pretrain", "sft", "best_of_n")  # Losses that compute the head's gradient together with the logits.


def forward_flops(model: Model, weights: WeightBytes, rows: BatchShape, counted: int) -> float:
    """FLOPs over all devices: 2 per parameter and token, attention over the whole square of a row (half of it if a kernel skips
    masked blocks), and the LM head at `counted` positions of a row."""
    config, tokens = model.config, rows.rows * rows.length
    attention = _attention_flops(model, rows)
    head = 2 * config.embed * config.vocab * rows.rows * counted
    return tokens * (2 * weights.matmul + attention) + head


def backward_flops(model: Model, weights: WeightBytes, rows: BatchShape, counted: int, logits_again: bool = True) -> float:
    """FLOPs of a backward pass over all devices: twice those of the forward pass (once for frozen kernels), plus the recomputed
    operations; `logits_again` adds the LM head to those."""
    config, tokens = model.config, rows.rows * rows.length
    attention = _attention_flops(model, rows)
    head = 2 * config.embed * config.vocab * rows.rows * counted
    kernels = 2 * weights.matmul * (2 if model.lora is None else 1)
    again = attention + 2 * _recomputed(model, weights) if config.remat else 0
    return tokens * (kernels + 2 * attention + again) + head * (logits_again + (2 if model.lora is None else 1))


def _recomputed(model: Model, weights: WeightBytes) -> int:
    """Parameters whose products with a token the backward pass of a model with remat computes again."""
    config = model.config
    if config.remat_saves == "nothing":
        return weights.matmul
    return 0 if config.experts is None else 3 * config.embed * config.mlp * config.experts.per_token * config.layers


def _attention_flops(model: Model, rows: BatchShape) -> float:
    """Forward FLOPs per token."""
    config = model.config
    seen = 1.0 if memory.attention_kind(model, rows) == "plain" else 0.5
    return 4 * seen * rows.length * config.heads * config.head_dim * config.layers


def update(model: Model, weights: WeightBytes, task: Task, slices: int, optimizer: str = "adamw") -> Work:
    """One model's share of an optimizer step with all its micro-batches. optimizer: the optimizer's kind."""
    mesh, part = model.sharding.mesh, BatchShape(max(1, task.rows.rows // task.micro), task.rows.length)
    devices = mesh.size
    again = task.stage not in _SUPERVISED
    flops = forward_flops(model, weights, task.rows, task.counted)
    flops += backward_flops(model, weights, task.rows, task.counted, again)
    at, kept = memory.local(model, part), model.sharding.keep_gathered
    passes = 3 if model.config.remat else 2
    work = _pass(model, weights, at, passes, kept) + _head(model, weights, part, task.counted, 3 if again else 2)
    if not kept:  # A TPU gathers the tables once for all micro-batches, a GPU in each.
        work = work + _tables(model, weights, bool(task.counted))
    work = work * task.micro + _gradients(model, weights, task.micro, slices)
    if kept:
        size = gathered(weights.whole, mesh.shape["fsdp"])
        work = work + Work(0.0, 2 * weights.whole, {"fsdp": size}, early=size)
    # The step reads parameters, gradients and moments, and writes parameters and moments.
    states = 2 * weights.gradients * task.micro + 3 * weights.gradients + 2 * weights.optimizer[optimizer]
    return Work(flops / devices, work.hbm + states, work.sent, early=work.early)


def forward(model: Model, weights: WeightBytes, task: Task) -> Work:
    """The work of a forward pass."""
    at = memory.local(model, task.rows)
    work = _pass(model, weights, at, 1) + _tables(model, weights, bool(task.counted))
    if task.counted:
        work = work + _head(model, weights, task.rows, task.counted, 1)
    return Work(forward_flops(model, weights, task.rows, task.counted) / model.sharding.mesh.size, work.hbm, work.sent)


def generate(model: Model, weights: WeightBytes, task: Task) -> tuple[Work, Work, Work]:
    """(work of resharding the weights, work of prefill, work of one decoding step)."""
    config, rows, mesh = model.config, task.rows, model.sharding.mesh.shape
    at = memory.local(model, rows, "generation")
    rules = model.sharding.generation.rules
    split = {axis: size for axis, size in mesh.items() if size > 1}
    ways = split_ways(rules["batch"], mesh) * split_ways(rules["heads"], mesh)
    placing = Work()
    if weights.moved:
        gathered_over = split_ways(("pipeline", "fsdp"), mesh) if "fsdp" not in rules["embed"] else 1
        axis = "fsdp" if mesh["fsdp"] > 1 else "pipeline"
        sent = {axis: gathered(weights.moved, gathered_over)} if gathered_over > 1 else {}
        placing = Work(0.0, 2 * weights.moved, sent)
    prefill = forward_flops(model, weights, rows, 1) / ways
    read = weights.generation * (1 if "fsdp" not in rules["embed"] else mesh["fsdp"])
    filled = Work(prefill, read + _activations(at), _generation_sent(model, weights, at, at.tokens, split, rules))
    slots = slot_counts(rows.length + rows.new)[-1]
    step_flops = rows.rows * (2 * weights.matmul + 4 * slots * config.heads * config.head_dim * config.layers
                              + 2 * config.embed * config.vocab) / ways
    sent = _generation_sent(model, weights, at, at.B, split, rules)
    return placing, filled, Work(step_flops, read + memory.cache(at, slots), sent, decoding_kernels(model))


def decoding_kernels(model: Model) -> int:
    """About the number of GPU kernels of a decoding step, without the LM head, the draw and the norms of DoRA."""
    adapters = 0 if model.lora is None else len(model.lora.adapted(model.base.abstract()["blocks"]))
    return model.config.layers * (LAYER_KERNELS + ADAPTER_KERNELS * adapters)


def launch_seconds(step: Work, platform: str) -> float:
    """Seconds that starting the kernels of a step adds on a GPU (`KERNEL_SECONDS`); 0 on a TPU. platform: "gpu" or "tpu"."""
    return step.kernels * KERNEL_SECONDS if platform == "gpu" else 0.0


def _generation_sent(model: Model, weights: WeightBytes, at: Local, tokens: float, split, rules) -> dict[str, float]:
    sent = {}
    if "tensor" in split and "tensor" in rules["heads"]:
        logits = gathered(at.B * model.config.vocab * 4, split["tensor"])
        sent["tensor"] = _reductions(model, at, False) * reduced(tokens * at.D * at.size, split["tensor"]) + logits
    if "fsdp" in split and "fsdp" in rules["embed"]:
        sent["fsdp"] = gathered(weights.layer * at.L + weights.head, split["fsdp"])
    return sent


def _activations(at: Local) -> float:
    """Bytes of activations that the layers read and write: about 12 arrays of the model's width, 6 of the MLP's width, and
    twice the attention scores (in both dtypes)."""
    return at.L * (12 * at.tokens * at.D * at.size + 6 * at.tokens * at.F * at.size + 2 * memory.scores(at))


def _pass(model: Model, weights: WeightBytes, at: Local, passes: int, kept: bool = False) -> Work:
    """Work of `passes` passes through the layers, without FLOPs: weights gathered, unless they are `kept` gathered, and read,
    activations exchanged. A backward pass counts as one, and the recomputed forward pass shares its gathers."""
    mesh = model.sharding.mesh.shape
    layers = weights.layer * at.L
    sent = {}
    if mesh["fsdp"] > 1 and model.sharding.zero == 3 and not kept:
        sent["fsdp"] = min(passes, 2) * gathered(layers, mesh["fsdp"])
    if mesh["tensor"] > 1:
        sent["tensor"] = _reductions(model, at, passes > 1) * reduced(at.tokens * at.D * at.size, mesh["tensor"])
    if mesh["context"] > 1:
        blocks = 2 * at.L * at.tokens * at.K * at.h * at.size * (mesh["context"] - 1)
        sent["context"] = blocks * (passes + (1 if passes > 1 else 0))  # Backward also sends gradients.
    if mesh["pipeline"] > 1:
        sent["pipeline"] = min(passes, 2) * model.sharding.pipeline_repeats * at.tokens * at.D * at.size
    return Work(0.0, passes * (layers + _activations(at)), sent)


def _reductions(model: Model, at: Local, backward: bool) -> float:
    """All-reduces of activations over tensor in a forward pass, or in a forward and a backward pass: of the embeddings, of the
    outputs of attention and of the MLP, and of the gradients of their inputs. If a layer is recomputed, so are the outputs that
    its backward pass reads. With sequence parallelism, the backward pass gathers inputs and gradients of kernels again."""
    layer = 2
    if backward:
        layer = 4
        if model.config.remat and model.config.remat_saves == "nothing":
            layer += 2 if at.output_read else 1
        if model.sharding.sequence_parallel:
            layer += 2
    return layer * at.L + 1


def _tables(model: Model, weights: WeightBytes, lm_head: bool) -> Work:
    """Work of gathering the embedding and, if it is used, the LM head over fsdp."""
    ways = model.sharding.mesh.shape["fsdp"]
    if ways == 1 or model.sharding.zero < 3:
        return Work()
    return Work(0.0, 0.0, {"fsdp": gathered(weights.table, ways) + (gathered(weights.head, ways) if lm_head else 0.0)})


def _head(model: Model, weights: WeightBytes, rows: BatchShape, counted: int, reads: int) -> Work:
    """Work of the LM head, without FLOPs: read `reads` times by each chunk, and in a backward pass (reads > 1) the gradient of
    its input, float32, reduced over tensor. `_tables` gathers the head, and `_gradients` has its gradient."""
    if not counted:
        return Work()
    mesh = model.sharding.mesh.shape
    at = memory.local(model, rows)
    _, chunks = memory.chunk(model, BatchShape(rows.rows, counted))
    positions = at.B * counted / mesh["context"]
    sent = {"tensor": reduced(positions * at.D * 4, mesh["tensor"])} if reads > 1 and mesh["tensor"] > 1 else {}
    return Work(0.0, reads * (chunks * weights.head + positions * at.V * 4 * 2), sent)


def _gradients(model: Model, weights: WeightBytes, micro: int, slices: int) -> Work:
    """Work of reducing gradients over the batch axes for each micro-batch, and of gathering parameters if zero < 3."""
    mesh, zero = model.sharding.mesh.shape, model.sharding.zero
    size = weights.learnt
    sent = {}
    if mesh["fsdp"] > 1:
        once = gathered if zero >= 2 else reduced
        sent["fsdp"] = micro * once(size, mesh["fsdp"])
        if zero < 3:
            sent["fsdp"] += gathered(weights.parameters, mesh["fsdp"])
    shard = size / (mesh["fsdp"] if zero >= 2 else 1)
    within = mesh["data"] // slices
    if within > 1:
        sent["data"] = micro * reduced(shard, within)
    if slices > 1:
        sent["slices"] = micro * reduced(shard / within, slices)
    if mesh["context"] > 1:
        sent["context"] = micro * reduced(shard, mesh["context"])
    return Work(0.0, 0.0, sent)
