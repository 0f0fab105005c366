"""Fields that several sections share, which they inherit and may change in defaults and help; and the optimizer section."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, at_least_or, between, one_of
from jaxalign.config.reading import when
from jaxalign.config.schema import field, section
from jaxalign.errors import UserError

AUTO = "auto"
"""The value of a size that the run chooses for its devices."""


_MOMENTS = when("kind", "adamw", "lion", "muon", "sophia")


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """This section sets its kind, the learning-rate schedule over the stage's steps, weight decay and gradient clipping; see
    docs/memory.md."""

    kind: str = field("adamw", "The optimizer. With adafactor the learning rate is relative to the scale of the weights.",
                      one_of("adamw", "lion", "adafactor", "muon", "sophia"))
    learning_rate: float = field(1e-3, "Peak learning rate; 0 leaves the weights unchanged.", at_least(0))
    schedule: str = field("cosine", "Schedule after the warm-up: constant, or decay to 0 (linear or half a cosine).",
                          one_of("constant", "linear", "cosine"))
    warmup_steps: int = field(0, "Steps of linear warm-up from 0.", at_least(0))
    b1: float = field(0.9, "Decay rate of the first moment (Muon: of the momentum).", between(0.0, 0.9999999), _MOMENTS)
    b2: float = field(0.95, "Decay rate of the second moment.", between(0.0, 0.9999999), _MOMENTS)
    eps: float = field(1e-8, "Adam's epsilon.", above(0), when("kind", "adamw", "muon", "sophia"))
    eps_inside: bool = field(False, "Add epsilon before the bias correction, as TensorFlow's Adam does.", None,
                             when("kind", "adamw"))
    weight_decay: float = field(0.0, "Decoupled weight decay, applied only to matrices.", at_least(0))
    clip_norm: float | None = field(1.0, "Clip gradients to this global norm; None: no clipping.", above(0))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.kind == "sophia" and config.model.attention != "plain":
            raise UserError(f"config.{name}.kind is 'sophia', which needs second derivatives; fused attention does not provide "
                            "them: set config.model.attention to 'plain'")


@dataclasses.dataclass(frozen=True)
class SamplingFields(Section):
    """How responses are sampled."""

    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k most likely tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of tokens with at least this total probability.",
                         between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Maximum length of a response, in tokens.", at_least(1))


@dataclasses.dataclass(frozen=True)
class Trained(Section):
    """How weights are updated and saved."""

    optimizer: Optimizer = section(Optimizer(), "The stage's optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))


@dataclasses.dataclass(frozen=True)
class PackedRows(Trained):
    """Supervised steps on documents packed into rows of one length."""

    row_length: int = field(256, "Tokens per packed row.", between(8, 1 << 20))
    batch_rows: int = field(4, "Rows per step.", between(1, 1 << 20))
    micro_batches: int = field(0, "Number of parts a step is split into to save memory; results do not depend on it. 0: one; "
                               "on a CPU, parts of about 1,024 tokens.", at_least(0))


@dataclasses.dataclass(frozen=True)
class PackedPairs(Trained):
    """Steps on pairs of dialogues."""

    batch: int = field(32, "Pairs per step.", between(1, 1 << 20))
    max_length: int = field(256, "Maximum length of a dialogue with its answer, in tokens; longer dialogues lose their oldest "
                            "turns.", between(8, 1 << 20))
    held_out_share: float = field(0.15, "Fraction of the pairs held out to measure accuracy.", between(0.0, 0.9))
    micro_batch_tokens: int | str = field(0, "Maximum tokens of packed pairs per device in a micro-batch; results do not "
                                          "depend on it. 0: 1/16 of the maximum tokens of a batch, but at least 768; auto: the "
                                          "fastest size that fits on the devices.", at_least_or(0, AUTO))


@dataclasses.dataclass(frozen=True)
class DecoderSizes(Section):
    """The sizes of a decoder."""

    layers: int = field(4, "Decoder layers.", at_least(1))
    embed: int = field(128, "Width of the residual stream.", at_least(1))
    heads: int = field(4, "Query heads.", at_least(1))
    kv_heads: int = field(2, "Key/value heads; they must divide the query heads.", at_least(1))
    head_dim: int = field(32, "Width of a head; must be even for rotary positions.", at_least(2))
    mlp: int = field(352, "Width of the gated MLP.", at_least(1))

    def check_heads(self, name: str) -> None:
        """Raises UserError if the heads of this section are not consistent. name: the section's name."""
        if self.heads % self.kv_heads:
            raise UserError(f"config.{name}.heads is {self.heads}; it must be a multiple of config.{name}.kv_heads "
                            f"({self.kv_heads})")
        if self.head_dim % 2:
            raise UserError(f"config.{name}.head_dim is {self.head_dim}; it must be even for rotary positions")
