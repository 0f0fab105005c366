"""Stage sft: supervised fine-tuning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class Sft(Section):
    """Supervised fine-tuning on revisions and helpful samples."""

    epochs: int = field(1, "Passes over the data.", at_least(1))
    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )
    rounds_used: str = field("all", "Learn from the revisions of all rounds, or of the last.", one_of("all", "last"))
