"""Stage best_of_n: fine-tuning on the best of several answers."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import above, at_least, between
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class BestOfN(Section):
    """The best of several answers by the preference model, and fine-tuning on it."""

    prompts: int = field(1024, "Prompts answered.", at_least(1))
    n: int = field(8, "Answers to each prompt.", at_least(1))
    batch: int = field(128, "Answers of a chunk, a multiple of n; as many rows decode together. Up to 4 chunks are one "
                            "queue.", at_least(1))
    threshold: float | None = field(None, "A best answer whose raw score is lower is not learnt from; None: all are.")
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    epochs: int = field(2, "Passes over what was chosen.", at_least(1))
    row_length: int = field(256, "Tokens of a packed row.", at_least(8))
    batch_rows: int = field(4, "Rows of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(
        0, "Parts a step is computed in, to save memory; results are the same. 0: one; on a CPU, parts of 1,024 tokens or so.",
        at_least(0),
    )
