"""Stage pretrain: the base model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.shared import Optimizer, PackedRows


@dataclasses.dataclass(frozen=True)
class PretrainConfig(PackedRows):
    """The helpful-only base model, trained on the text of the data source."""

    steps: int = field(1700, "Optimizer steps; 0 keeps the random weights.", at_least(0))
    context_weight: float = field(0.1, "Loss weight of context tokens (requests, principles); tokens of the model's own text "
                                  "have weight 1.", between(0.0, 1.0))
    optimizer: Optimizer = section(
        Optimizer(learning_rate=2.5e-3, schedule="linear", warmup_steps=30, weight_decay=0.01), "The stage's optimizer."
    )
    checkpoint_every: int = like(PackedRows, "checkpoint_every", default=150)
