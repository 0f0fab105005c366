"""The device mesh: its axes and the arrays that each axis splits."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig, check_divides, nearest_divisors
from jaxalign.config.constraints import at_least, none_or_some_of, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field, require_valid
from jaxalign.errors import UserError
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import data_source

_FSDP = unless("fsdp", 1, "above 1")
_PIPELINE = unless("pipeline", 1, "above 1")


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    """The mesh of devices. It may use fewer devices than the machine has. The mesh changes results only by rounding."""

    data: int = field(1, "Number of ways to split the batch; each part has a full copy of the parameters.", at_least(1))
    fsdp: int = field(1, "Number of ways to split the batch, the parameters and the optimizer state.", at_least(1))
    tensor: int = field(1, "Number of ways to split heads, MLP and vocabulary.", at_least(1))
    context: int = field(1, "Number of ways to split the tokens of each row, for long sequences.", at_least(1))
    pipeline: int = field(1, "Number of pipeline stages that the layers are split into.", at_least(1))
    pipeline_micro_batches: int = field(0, "Micro-batches that pass through the pipeline one after another; 0: one per stage. "
                                        "More micro-batches reduce idle time.", at_least(0), _PIPELINE)
    pipeline_repeats: int = field(1, "Blocks of layers per stage; above 1 the schedule is interleaved.", at_least(1),
                                  _PIPELINE)
    slices: int = field(1, "Number of groups of devices connected by a slower network; data is split over them.", at_least(1))
    zero: int = field(3, "What fsdp splits in addition to the batch. 1: the optimizer state; 2: also the gradients; 3: also "
                      "the parameters.", one_of(1, 2, 3), _FSDP)
    keep_gathered: str = field("never", "Whether an update gathers the weights over fsdp once for all of its micro-batches "
                               "(always) or in the forward and backward pass of each (never); auto: always if it fits and is "
                               "faster by the plan. See docs/memory.md.", one_of("never", "always", "auto"), _FSDP,
                               when("zero", 3))
    sequence_parallel: bool = field(False, "Between layers, also split activations along the sequence, over the tensor axis.",
                                    None, unless("tensor", 1, "above 1"))
    generation: str = field("tensor", "Sharding of weights during sampling: gathered over all axes except tensor (tensor), as "
                            "in training (training), or replicated on each device (whole).",
                            one_of("tensor", "training", "whole"))
    offload: tuple[str, ...] = field((), "In ppo and online_dpo, arrays to keep in host memory during phases that do not need "
                                     "them: optimizer state, and frozen roles (reference, reward models). See docs/memory.md.",
                                     none_or_some_of("optimizer", "frozen"))

    def __post_init__(self) -> None:
        require_valid(self, "Mesh")

    def check(self, config: WholeConfig, name: str) -> None:
        if self.data % self.slices:
            raise UserError(f"config.mesh.slices is {self.slices}; it must divide config.mesh.data ({self.data}), which is "
                            f"split over slices: set it to {nearest_divisors((self.data,), self.slices)}")
        parts = self.pipeline_micro_batches or self.pipeline
        if self.pipeline_repeats > 1 and parts < self.pipeline:
            raise UserError(f"config.mesh.pipeline_repeats is {self.pipeline_repeats} and config.mesh.pipeline_micro_batches "
                            f"{parts}; interleaving needs at least as many micro-batches as stages ({self.pipeline})")
        self._check_offload(config)
        self._check_sizes(config)

    def _check_offload(self, config: WholeConfig) -> None:
        """Checks that a stage of the run can offload, and that some phase does not need the frozen arrays."""
        if self.offload and not {"ppo", "online_dpo"}.intersection(config.stages):
            raise UserError(f"config.mesh.offload is {self.offload}, which moves arrays between the phases of ppo and "
                            "online_dpo; neither is in config.stages, and the other stages need all arrays at every step: "
                            "leave it empty")
        adapted = config.lora.rank or config.lora.path
        own_models = "ppo" in config.stages and not {"model", "distilled"}.isdisjoint(names_in(config.reward.source))
        if "frozen" in self.offload and adapted and not own_models:
            raise UserError("config.mesh.offload has 'frozen', but with adapters the reference and the reward model share the "
                            "policy's frozen base, which every phase needs: leave 'frozen' out, or set config.lora.rank to 0")

    def _check_sizes(self, config: WholeConfig) -> None:
        """Checks that the mesh divides the model's sizes. A checkpoint's sizes are unknown until it is read."""
        if config.model.source == "huggingface":
            return
        decoders = {"model": config.model}
        if "reward_distill" in config.stages:
            decoders["reward_distill"] = config.reward_distill
        tensor = {f"config.{name}.{size}": getattr(sizes, size) for name, sizes in decoders.items()
                  for size in ("heads", "kv_heads", "mlp")}
        widths = {f"config.{name}.embed": sizes.embed for name, sizes in decoders.items()}
        layers = {f"config.{name}.layers": sizes.layers for name, sizes in decoders.items()}
        source = data_source(config)
        if not source.alphabet:
            tensor["config.world.vocab_size"] = config.world.vocab_size
        elif self.tensor > 1:
            raise UserError(f"config.mesh.tensor is {self.tensor}; it cannot split the vocabulary of {source.name}, which has "
                            "only a few characters: use mesh.data or mesh.fsdp")
        repeats = " x pipeline_repeats" if self.pipeline_repeats > 1 else ""
        check_divides("config.mesh.tensor", self.tensor, tensor)
        check_divides("config.mesh.fsdp", self.fsdp, widths)
        check_divides(f"config.mesh.pipeline{repeats}", self.pipeline * self.pipeline_repeats, layers)
