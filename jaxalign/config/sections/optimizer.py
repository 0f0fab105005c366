"""The optimizer section that every training stage contains."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.schema import field
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """An optimizer with gradient clipping and a learning-rate schedule over the stage's steps (docs/memory.md)."""

    kind: str = field("adamw", "The optimizer; adafactor's rate is relative to a weight's size.",
                      one_of("adamw", "lion", "adafactor", "muon", "sophia"))
    learning_rate: float = field(1e-3, "Peak learning rate; 0 keeps the weights.", at_least(0))
    schedule: str = field("cosine", "After the warm-up: constant, or down to 0 on a line or a half cosine.",
                          one_of("constant", "linear", "cosine"))
    warmup_steps: int = field(0, "Steps of linear warm-up from 0.", at_least(0))
    b1: float = field(0.9, "Decay of the first moment (Muon: of the momentum).", between(0.0, 0.9999999))
    b2: float = field(0.95, "Decay of the second moment.", between(0.0, 0.9999999))
    eps: float = field(1e-8, "Adam's epsilon.", above(0))
    eps_inside: bool = field(False, "TensorFlow's form of Adam: epsilon joins before the bias correction.")
    weight_decay: float = field(0.0, "Decoupled weight decay, on matrices only.", at_least(0))
    clip_norm: float | None = field(1.0, "Global gradient norm clipped to; None: no clipping.", above(0))

    def check(self, config: WholeConfig, name: str) -> None:
        if self.kind == "sophia" and config.model.attention != "plain":
            raise UserError(f"config.{name}.kind is 'sophia', which needs second derivatives, and fused attention has none: "
                            "set config.model.attention to 'plain'")
