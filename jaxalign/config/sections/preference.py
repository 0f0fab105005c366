"""Stage preference: the preference model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig, check_dialogue_length
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source


@dataclasses.dataclass(frozen=True)
class Preference(Section):
    """The preference model, trained on soft labels."""

    epochs: int = field(6, "Passes over the comparisons.", at_least(1))
    batch: int = field(32, "Pairs of a step.", at_least(1))
    max_length: int = field(256, "Longest dialogue with its answer; longer ones are cut at a turn.", at_least(8))
    held_out_share: float = field(0.15, "Share of the comparisons kept for accuracy and calibration.", between(0.0, 0.9))
    centering_coef: float = field(0.01, "Weight of the squared sum of a pair's scores, to centre them.", at_least(0))
    normalise: bool = field(True, "Shift and scale scores to mean 0 and deviation 1 on the policy's samples.")
    members: int = field(1, "Models trained apart, each with its own head and order of the pairs; together they score.",
                         between(1, 64))
    combine: str = field("mean", "One score from those of the members: their mean, their least, or their mean less "
                         "std_weight deviations.", one_of("mean", "min", "mean_minus_std"))
    std_weight: float = field(1.0, "Deviations taken off the mean (combine=mean_minus_std).", at_least(0))
    margin_weight: float = field(0.0, "The better answer is to be ahead by so many times its row's \"margin\" (preference "
                                 "files); 0: margins are not read.", at_least(0))
    temperature_fit: bool = field(False, "Fit a temperature on held-out pairs and show the calibration under it; scores stay "
                                  "as they are.")
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens of packed pairs that a device computes at once; results are the same. 0: "
                                    "a sixteenth of what a batch could need, at least 768.", at_least(0))

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        if self.margin_weight and not data_source(config).margins:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight} but the pairs of config.data.source "
                            f"{config.data.source!r} have no margins; leave it at 0, or set data.source to 'preferences_jsonl'")
        if self.members == 1 and self.combine != "mean":
            raise UserError(f"config.preference.combine is {self.combine!r} but config.preference.members is 1, so there is "
                            "one score: set members to at least 2, or leave combine at 'mean'")
