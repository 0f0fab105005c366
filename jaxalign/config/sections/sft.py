"""Stage sft: supervised fine-tuning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.config.sections.shared import PackedRows


@dataclasses.dataclass(frozen=True)
class Sft(PackedRows):
    """Supervised fine-tuning on revisions and helpful samples."""

    epochs: int = field(1, "Passes over the data.", at_least(1))
    rounds_used: str = field("all", "Train on the revisions of all rounds, or only of the last round.", one_of("all", "last"))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "The stage's optimizer.")
