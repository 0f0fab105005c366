"""The optimizer section of every training stage."""

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
