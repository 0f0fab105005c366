"""Stage best_of_n: fine-tuning on the best of several answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.config.sections.shared import PackedRows, Sampling


@dataclasses.dataclass(frozen=True)
class BestOfN(Sampling, PackedRows):
    """The best of several answers by the preference model, and fine-tuning on it."""

    prompts: int = field(1024, "Prompts answered.", at_least(1))
    n: int = field(8, "Answers to each prompt.", at_least(1))
    batch: int = field(128, "Answers in a chunk, a multiple of n, and rows that decode together. Up to 4 chunks form one "
                       "queue.", at_least(1))
    threshold: float | None = field(None, "Leave out prompts whose best answer has a lower raw score; None: keep all.")
    epochs: int = field(2, "Passes over the chosen answers.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "Its optimizer.")
