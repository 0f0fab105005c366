"""The device mesh: its axes and what is split over them."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, none_or_some_of, one_of
from jaxalign.config.division import check_divides, nearest_divisors
from jaxalign.config.reading import unless
from jaxalign.config.schema import field
from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source

_PIPELINE = unless("pipeline", 1, "above 1")


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    """The number of devices and what each holds. It may be fewer than the machine has; results do not depend on it."""

    data: int = field(1, "Ways the batch is split, each with a full copy of the parameters.", at_least(1))
    fsdp: int = field(1, "Ways the batch, parameters and optimizer state are split.", at_least(1))
    tensor: int = field(1, "Ways heads, MLP and vocabulary are split.", at_least(1))
    context: int = field(1, "Ways the tokens of each row are split, for long sequences.", at_least(1))
    pipeline: int = field(1, "Ways the layers are split.", at_least(1))
    pipeline_micro_batches: int = field(0, "Parts of a batch that pass through the pipeline one after another; 0: as many as "
                                        "stages. More parts leave less of the pipeline idle.", at_least(0), _PIPELINE)
    pipeline_repeats: int = field(1, "Blocks of layers in a stage; above 1 the schedule is interleaved.", at_least(1),
                                  _PIPELINE)
    slices: int = field(1, "Groups of devices joined by a slower network; data is split over them.", at_least(1))
    zero: int = field(3, "What fsdp splits besides the batch: 1 the optimizer state, 2 gradients too, 3 parameters too.",
                      one_of(1, 2, 3), unless("fsdp", 1, "above 1"))
    sequence_parallel: bool = field(False, "Split activations between layers over tensor, along the sequence.", None,
                                    unless("tensor", 1, "above 1"))
    generation: str = field("tensor", "Layout of weights during sampling: gathered over all axes but tensor (tensor), as in "
                            "training (training), or whole on each device (whole).", one_of("tensor", "training", "whole"))
    offload: tuple[str, ...] = field((), "In ppo and online_dpo, arrays kept in host memory in the phases that do not need "
                                     "them: optimizer state, and frozen roles (reference, reward models). docs/memory.md.",
                                     none_or_some_of("optimizer", "frozen"))

    def check(self, config: WholeConfig, name: str) -> None:
        self._check_axes()
        self._check_offload(config)
        self._check_sizes(config)

    def _check_axes(self) -> None:
        """Slices must divide the data axis, and interleaving needs enough micro-batches."""
        if self.data % self.slices:
            raise UserError(f"config.mesh.slices is {self.slices}; it must divide config.mesh.data ({self.data}), which is "
                            f"split over them: {nearest_divisors((self.data,), self.slices)} would")
        parts = self.pipeline_micro_batches or self.pipeline
        if self.pipeline_repeats > 1 and parts < self.pipeline:
            raise UserError(f"config.mesh.pipeline_repeats is {self.pipeline_repeats} and config.mesh.pipeline_micro_batches "
                            f"{parts}; interleaving needs at least as many micro-batches as stages ({self.pipeline})")

    def _check_offload(self, config: WholeConfig) -> None:
        """Arrays move only between the phases of a stage, and only those that no other phase needs."""
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
        """The sizes that the mesh splits must divide evenly. A checkpoint's sizes are known only once it is read."""
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
            raise UserError(f"config.mesh.tensor is {self.tensor}; the vocabulary of {source.name} is a few single characters, "
                            "which it cannot split: use mesh.data or mesh.fsdp")
        repeats = " x pipeline_repeats" if self.pipeline_repeats > 1 else ""
        check_divides("config.mesh.tensor", self.tensor, tensor)
        check_divides("config.mesh.fsdp", self.fsdp, widths)
        check_divides(f"config.mesh.pipeline{repeats}", self.pipeline * self.pipeline_repeats, layers)
