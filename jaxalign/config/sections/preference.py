"""Stage preference: the preference model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig, check_dialogue_length
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.config.sections.shared import PackedPairs
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source


@dataclasses.dataclass(frozen=True)
class Preference(PackedPairs):
    """The preference model, trained on soft labels."""

    epochs: int = field(6, "Passes over the comparisons.", at_least(1))
    max_length: int = like(PackedPairs, "max_length", doc="Longest dialogue with its answer, in tokens; longer ones are cut at "
                           "a turn.")
    held_out_share: float = like(PackedPairs, "held_out_share", doc="Share of the comparisons held out to measure accuracy and "
                                 "calibration.")
    centering_coef: float = field(0.01, "Weight of the squared sum of a pair's scores, which centres them.", at_least(0))
    normalise: bool = field(True, "Shift and scale scores to mean 0 and deviation 1 on the policy's samples.")
    members: int = field(1, "Models in the ensemble, trained independently, each with its own head and order of the pairs.",
                         between(1, 64))
    combine: str = field("mean", "The ensemble's score: the mean of its members, their minimum, or their mean minus std_weight "
                         "deviations.", one_of("mean", "min", "mean_minus_std"), unless("members", 1, "to at least 2"))
    std_weight: float = field(1.0, "Deviations subtracted from the mean (combine=mean_minus_std).", at_least(0),
                              when("combine", "mean_minus_std"))
    margin_weight: float = field(0.0, "Factor of a row's \"margin\" (preference files), by which the better answer should "
                                 "score higher; 0: margins are not read.", at_least(0))
    temperature_fit: bool = field(False, "Fit a temperature on held-out pairs and report the calibration with it; scores do "
                                  "not change.")
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=10), "Its optimizer.")

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        if self.margin_weight and not data_source(config).margins:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight} but the pairs of config.data.source "
                            f"{config.data.source!r} have no margins; leave it at 0, or set data.source to 'preferences_jsonl'")
