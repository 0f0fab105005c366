"""Stage preference: the preference model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig, check_dialogue_length
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.shared import Optimizer, PackedPairs
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source


@dataclasses.dataclass(frozen=True)
class PreferenceConfig(PackedPairs):
    """The preference model, trained on soft labels."""

    epochs: int = field(3, "Passes over the comparisons.", at_least(1))
    steps: int = field(0, "Number of steps of each member; 0: as many as the epochs need, which is an estimate with "
                            "data.window.", at_least(0))
    max_length: int = like(PackedPairs, "max_length", doc="Maximum length of a dialogue with its answer, in tokens; longer "
                           "dialogues are cut at a turn.")
    held_out_share: float = like(PackedPairs, "held_out_share", default=0.22, doc="Fraction of the comparisons held out to "
                                 "measure accuracy and calibration.")
    centering_coef: float = field(0.01, "Weight of the penalty that centres scores: the squared sum of a pair's scores.",
                                  at_least(0))
    normalise: bool = field(True, "Normalise scores to mean 0 and standard deviation 1 on the policy's samples.")
    members: int = field(3, "Number of models in the ensemble; each is trained separately, with its own head and order of "
                         "pairs.", between(1, 64))
    combine: str = field("mean_minus_std", "The ensemble's score: the mean of the members' scores, their minimum, or their "
                         "mean minus std_weight standard deviations.", one_of("mean", "min", "mean_minus_std"),
                         unless("members", 1, "to at least 2"))
    std_weight: float = field(1.0, "Number of standard deviations to subtract from the mean (combine=mean_minus_std).",
                              at_least(0), when("combine", "mean_minus_std"))
    margin_weight: float = field(0.0, "Multiplier of a row's \"margin\" (preference files), the amount by which the chosen "
                                 "answer should score higher; 0: ignore margins.", at_least(0))
    temperature_fit: bool = field(False, "Fit a temperature on held-out pairs and report the calibration with it; scores do "
                                  "not change.")
    early_stopping: bool = field(False, "Measure the loss on half of the held-out dialogues during training, keep the weights "
                                 "with the lowest loss, and stop when it no longer falls. The other half measures accuracy.")
    eval_every: int = field(0, "Steps between evaluations of the held-out loss; 0: once per epoch.", at_least(0),
                            when("early_stopping", True))
    patience: int = field(3, "Stop after this many consecutive evaluations without a lower held-out loss.", at_least(1),
                          when("early_stopping", True))
    human: tuple[str, ...] = field((), "Files of preferences (chosen/rejected), in any format of docs/data_formats.md, whose "
                                   "pairs are added to the pairs of stage compare.")
    human_weight: float = field(1.0, "Weight of the loss of a pair from a file of human; a pair of stage compare has weight 1.",
                                above(0), unless("human", (), "to a preference file"))
    on_failure: str = field("warn", "If the interval of the held-out accuracy does not exceed the best baseline: warn, or stop "
                            "the run at the end of the stage, before RL.", one_of("warn", "stop"))
    optimizer: Optimizer = section(Optimizer(learning_rate=1e-3, schedule="linear", warmup_steps=10),
                                   "The stage's optimizer.")

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        if self.margin_weight and not data_source(config).margins:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight} but the pairs of config.data.source "
                            f"{config.data.source!r} have no margins; leave it at 0, or set data.source to 'preferences_jsonl'")
        if self.margin_weight and "compare" in config.stages:
            raise UserError(f"config.preference.margin_weight is {self.margin_weight}, but the pairs of stage compare have no "
                            "margins; leave it at 0, or remove compare from config.stages")
        labels_pairs = "compare" in config.stages or data_source(config).feedback
        if self.human and not labels_pairs:
            raise UserError(f"config.preference.human is {self.human!r}, but the pairs of config.data.source "
                            f"{config.data.source!r} are not made by stage compare; list the files in config.data.extra_train "
                            "instead, or add compare to config.stages")
        if self.human and config.data.weights:
            raise UserError(f"config.preference.human is {self.human!r}, but config.data.weights already sets the shares of "
                            "files; set human_weight instead, and leave config.data.weights empty")
        if self.early_stopping and labels_pairs and not self.held_out_share:
            raise UserError("config.preference.early_stopping is True, but config.preference.held_out_share is 0, so no pair "
                            "measures the loss; set held_out_share above 0, or early_stopping to False")
