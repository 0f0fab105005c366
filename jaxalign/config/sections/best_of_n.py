"""Stage best_of_n: fine-tuning on the best of n answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field, section
from jaxalign.config.sections.shared import Optimizer, PackedRows, SamplingFields


@dataclasses.dataclass(frozen=True)
class BestOfNConfig(SamplingFields, PackedRows):
    """Fine-tuning on the answer with the highest preference-model score among n samples per prompt."""

    prompts: int = field(1024, "Number of prompts to answer.", at_least(1))
    n: int = field(8, "Answers sampled per prompt.", at_least(1))
    batch: int = field(128, "Answers per chunk, a multiple of n; also the number of rows decoded together. Up to 4 chunks form "
                       "one queue.", at_least(1))
    threshold: float | None = field(None, "Drop prompts whose best answer has a lower raw score than this; None: keep all.")
    required_share: float = field(0.05, "Stop if a smaller share of the prompts has a complete answer above the threshold.",
                                  between(0.0, 1.0))
    epochs: int = field(2, "Passes over the selected answers.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "The stage's optimizer.")
