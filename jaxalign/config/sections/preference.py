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
    max_length: int = like(PackedPairs, "max_length", doc="Maximum length of a dialogue with its answer, in tokens; longer "
                           "dialogues are cut at a turn.")
    held_out_share: float = like(PackedPairs, "held_out_share", doc="Fraction of the comparisons held out to measure accuracy "
                                 "and calibration.")
    centering_coef: float = field(0.01, "Weight of the penalty that centres scores: the squared sum of a pair's scores.",
                                  at_least(0))
    normalise: bool = field(True, "Normalise scores to mean 0 and standard deviation 1 on the policy's samples.")
    members: int = field(1, "Number of models in the ensemble; each is trained separately, with its own head and order of "
                         "pairs.", between(1, 64))
    combine: str = field("mean", "The ensemble's score: the mean of the members' scores, their minimum, or their mean minus "
                         "std_weight standard deviations.", one_of("mean", "min", "mean_minus_std"),
                         unless("members", 1, "to at least 2"))
    std_weight: float = field(1.0, "Number of standard deviations to subtract from the mean (combine=mean_minus_std).",
                              at_least(0), when("combine", "mean_minus_std"))
    margin_weight: float = field(0.0, "Multiplier of a row's \"margin\" (preference files), the amount by which the chosen "
                                 "answer should score higher; 0: ignore margins.", at_least(0))
    temperature_fit: bool = field(False, "Fit a temperature on held-out pairs and report the calibration with it; scores do "
                                  "not change.")
    optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=10),
                                   "The stage's optimizer.")

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        if self.margin_weight and not data_source(config).margins:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight} but the pairs of config.data.source "
                            f"{config.data.source!r} have no margins; leave it at 0, or set data.source to 'preferences_jsonl'")
        if self.margin_weight and "compare" in config.stages:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight}, but the pairs of stage compare have no "
                            "margins; leave it at 0, or remove compare from config.stages")
