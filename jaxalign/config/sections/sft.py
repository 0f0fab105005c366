"""Stage sft: supervised fine-tuning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.constraints import at_least, between, none_or_some_of, one_of
from jaxalign.config.reading import when
from jaxalign.config.schema import field, section
from jaxalign.config.sections.shared import Optimizer, PackedRows


@dataclasses.dataclass(frozen=True)
class SFTConfig(PackedRows):
    """Supervised fine-tuning on revisions and helpful samples."""

    epochs: int = field(1, "Passes over the data.", at_least(1), when("steps", 0))
    steps: int = field(0, "Number of steps; 0: as many as the epochs need, which is an estimate with data.window.", at_least(0))
    rounds_used: str = field("all", "Train on the revisions of all rounds, or only of the last round.", one_of("all", "last"))
    keep: tuple[str, ...] = field(("unchanged",), "Revisions that are trained on although they are not ordinary: unchanged, "
                                  "grown (see revise.max_growth), cut_off, critique_refused; see docs/cai.md.",
                                  none_or_some_of("unchanged", "grown", "cut_off", "critique_refused"))
    min_rows: int = field(64, "Warn if fewer rows can be trained on.", at_least(0))
    min_share: float = field(0.5, "Warn if a smaller share of the rows of revise can be trained on.", between(0.0, 1.0))
    required_rows: int = field(8, "Stop if fewer rows of revise can be trained on.", at_least(0))
    required_share: float = field(0.05, "Stop if a smaller share of the rows of revise can be trained on.", between(0.0, 1.0))
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear"), "The stage's optimizer.")
