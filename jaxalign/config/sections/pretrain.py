"""Stage pretrain: the base model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class Pretrain(Section):
    """The helpful-only base, trained on the world's text."""

    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    steps: int = field(1300, "Optimizer steps; 0 leaves the random weights.", at_least(0))
    optimizer: Optimizer = section(
        Optimizer(learning_rate=2.5e-3, schedule="linear", warmup_steps=30, weight_decay=0.01), "Its optimizer."
    )
    context_weight: float = field(
        0.1, "Weight in the loss of what a model is given (requests, principles); what it writes weighs 1.", between(0.0, 1.0)
    )
    checkpoint_every: int = field(150, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )
