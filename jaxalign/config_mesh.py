"""What must hold between the mesh and the rest of the config: what is split must divide, and what is chosen must act."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxalign.errors import UserError

if TYPE_CHECKING:
    from jaxalign.config import Config

GENERATING = ("revise", "compare", "reward_distill", "best_of_n", "online_dpo", "ppo", "evaluate")
"""The stages that sample."""


def check(config: Config) -> None:
    """Raises UserError at the first thing that does not fit the mesh."""
    _check_mesh(config)
    _check_offload(config)
    _check_tensor(config)
    for name, rows, parts in _batches(config):
        _check_batch(config, name, rows, parts)


def _check_mesh(config: Config) -> None:
    """Choices that act on an axis alone are refused where there is none."""
    mesh, usual = config.mesh, type(config.mesh)()
    needs = [("zero", "fsdp"), ("sequence_parallel", "tensor"), ("pipeline_micro_batches", "pipeline"),
             ("pipeline_repeats", "pipeline")]
    for name, axis in needs:
        value, default = getattr(mesh, name), getattr(usual, name)
        if value != default and getattr(mesh, axis) == 1:
            raise UserError(f"config.mesh.{name} is {value} but config.mesh.{axis} is 1, so nothing would follow from it: set "
                            f"mesh.{axis} above 1, or mesh.{name} to {default}")
    if mesh.data % mesh.slices:
        raise UserError(f"config.mesh.slices is {mesh.slices}; it must divide config.mesh.data ({mesh.data}), which is split "
                        f"over them: {nearest_divisors((mesh.data,), mesh.slices)} would")
    parts = mesh.pipeline_micro_batches or mesh.pipeline
    if mesh.pipeline_repeats > 1 and parts < mesh.pipeline:
        raise UserError(f"config.mesh.pipeline_repeats is {mesh.pipeline_repeats} and config.mesh.pipeline_micro_batches "
                        f"{parts}; interleaving needs at least as many micro-batches as stages ({mesh.pipeline})")


def _check_offload(config: Config) -> None:
    """Moving between phases is for stages that have some, and for what is not shared by all of them."""
    offload = config.mesh.offload
    if offload and not {"ppo", "online_dpo"}.intersection(config.stages):
        raise UserError(f"config.mesh.offload is {offload}, which moves arrays between the phases of ppo and online_dpo; "
                        "neither is in config.stages, and the others need all they hold at every step: leave it empty")
    adapted = config.lora.rank or config.lora.path
    own_models = "ppo" in config.stages and not {"model", "distilled"}.isdisjoint(config.reward.source.split("+"))
    if "frozen" in offload and adapted and not own_models:
        raise UserError("config.mesh.offload has 'frozen', but with adapters the reference and what scores are the base that "
                        "the policy stands on, which every phase needs: leave 'frozen' out, or set config.lora.rank to 0")


def _check_tensor(config: Config) -> None:
    """What the mesh splits must split evenly. A checkpoint's sizes are known only once it is read."""
    if config.model.source == "huggingface":
        return
    model, mesh = config.model, config.mesh
    sizes = {"config.model.heads": model.heads, "config.model.kv_heads": model.kv_heads, "config.model.mlp": model.mlp}
    widths = {"config.model.embed": model.embed}
    if "reward_distill" in config.stages:
        student = config.reward_distill
        sizes |= {f"config.reward_distill.{name}": getattr(student, name) for name in ("heads", "kv_heads", "mlp")}
        widths["config.reward_distill.embed"] = student.embed
    if config.data.source == "world":
        sizes["config.world.vocab_size"] = config.world.vocab_size
    elif config.data.source == "arithmetic" and mesh.tensor > 1:
        raise UserError(f"config.mesh.tensor is {mesh.tensor}; the vocabulary of arithmetic is a few single characters, "
                        "which it cannot split: use mesh.data or mesh.fsdp")
    layers = {"config.model.layers": model.layers}
    if "reward_distill" in config.stages:
        layers["config.reward_distill.layers"] = config.reward_distill.layers
    stages = mesh.pipeline * mesh.pipeline_repeats
    for axis, (asked, split) in {
        "tensor": (mesh.tensor, sizes), "fsdp": (mesh.fsdp, widths),
        "pipeline" + (" x pipeline_repeats" if mesh.pipeline_repeats > 1 else ""): (stages, layers),
    }.items():  # fmt: skip
        for name, size in split.items():
            if size % asked:
                near = nearest_divisors(tuple(split.values()), asked)
                raise UserError(f"config.mesh.{axis} is {asked}; it must divide {name} ({size}): {near} would, or change that")


def nearest_divisors(sizes: Sequence[int], asked: int) -> str:
    """The numbers next to `asked`, below and above, that divide all of `sizes`, in words."""
    common = math.gcd(*sizes)
    fits = [number for number in range(1, common + 1) if common % number == 0]
    return " or ".join(str(n) for n in ([n for n in fits if n < asked][-1:] + [n for n in fits if n > asked][:1]))


def _batches(config: Config) -> list[tuple[str, int, dict[str, int]]]:
    """Every batch that will be made: its field, its size, and the fields whose product must divide it."""
    ppo = config.ppo
    batches = {
        "pretrain": [("pretrain.batch_rows", config.pretrain.batch_rows,
                      {"pretrain.micro_batches": config.pretrain.micro_batches or 1})],
        "revise": [("revise.batch", config.revise.batch, {})],
        "sft": [("sft.batch_rows", config.sft.batch_rows, {"sft.micro_batches": config.sft.micro_batches or 1})],
        "compare": [("compare.batch", config.compare.batch, {})],
        "preference": [("preference.batch", config.preference.batch, {})],
        "reward_distill": [("reward_distill.batch", config.reward_distill.batch,
                            {"reward_distill.samples": config.reward_distill.samples}),
                           ("reward_distill.batch_pairs", config.reward_distill.batch_pairs,
                            {"reward_distill.micro_batches": config.reward_distill.micro_batches})],
        "best_of_n": [("best_of_n.batch", config.best_of_n.batch, {"best_of_n.n": config.best_of_n.n}),
                      ("best_of_n.batch_rows", config.best_of_n.batch_rows,
                       {"best_of_n.micro_batches": config.best_of_n.micro_batches or 1})],
        "dpo": [("dpo.batch", config.dpo.batch, {})],
        "online_dpo": [("online_dpo.batch", config.online_dpo.batch,
                        {"online_dpo.minibatches": config.online_dpo.minibatches})],
        "ppo": [("ppo.batch", ppo.batch, {"ppo.minibatches": ppo.minibatches})],
        "evaluate": [("evaluate.batch", config.evaluate.batch, {})],
    }
    return [batch for stage in config.stages for batch in batches.get(stage, [])]


def _check_batch(config: Config, name: str, rows: int, parts: dict[str, int]) -> None:
    mesh = config.mesh
    split = {f"mesh.{axis}": getattr(mesh, axis) for axis in ("data", "fsdp")}
    ways = [parts | split | {"mesh.pipeline_micro_batches": mesh.pipeline_micro_batches or mesh.pipeline}]
    if name.partition(".")[0] in GENERATING:  # No row is split while it is sampled, but rows over all devices.
        axes = ("pipeline", "context", "tensor") if mesh.generation == "whole" else ("pipeline", "context")
        ways.append(split | {f"mesh.{axis}": getattr(mesh, axis) for axis in axes})
    for factors in ways:
        product, words = 1, []
        for factor, size in factors.items():
            product *= size
            if size > 1:
                words.append(f"config.{factor} ({size})")
        if rows % product:
            near = " or ".join(str(x) for x in (rows // product * product, -(-rows // product) * product) if x)
            raise UserError(f"config.{name} is {rows}; it must be a multiple of {' x '.join(words)}"
                            + (f" = {product}" if len(words) > 1 else "") + f", as {near} is")
