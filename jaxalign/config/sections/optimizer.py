"""The optimizer section that every training stage contains."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.reading import when
from jaxalign.config.schema import field
from jaxalign.errors import UserError

_MOMENTS = when("kind", "adamw", "lion", "muon", "sophia")


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """An optimizer with gradient clipping and a learning-rate schedule over the stage's steps (docs/memory.md)."""

    kind: str = field("adamw", "The optimizer; the learning rate of adafactor is relative to the size of a weight.",
                      one_of("adamw", "lion", "adafactor", "muon", "sophia"))
    learning_rate: float = field(1e-3, "Peak learning rate; 0 leaves the weights unchanged.", at_least(0))
    schedule: str = field("cosine", "After the warm-up: constant, or decay to 0 (linear or half a cosine).",
                          one_of("constant", "linear", "cosine"))
    warmup_steps: int = field(0, "Steps of linear warm-up from 0.", at_least(0))
    b1: float = field(0.9, "Decay of the first moment (Muon: of the momentum).", between(0.0, 0.9999999), _MOMENTS)
    b2: float = field(0.95, "Decay of the second moment.", between(0.0, 0.9999999), _MOMENTS)
    eps: float = field(1e-8, "Adam's epsilon.", above(0), when("kind", "adamw", "muon", "sophia"))
    eps_inside: bool = field(False, "Add epsilon before the bias correction, as TensorFlow's Adam does.", None,
                             when("kind", "adamw"))
    weight_decay: float = field(0.0, "Decoupled weight decay, on matrices only.", at_least(0))
    clip_norm: float | None = field(1.0, "Global norm to which gradients are clipped; None: no clipping.", above(0))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.kind == "sophia" and config.model.attention != "plain":
            raise UserError(f"config.{name}.kind is 'sophia', which needs second derivatives, and fused attention has none: "
                            "set config.model.attention to 'plain'")
