"""Stage dpo: direct preference objectives."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig, check_dialogue_length
from jaxalign.config.constraints import above, at_least, between, one_of, sum_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source

PAIRWISE_OBJECTIVES = (
    "sigmoid", "conservative", "robust", "hinge", "ipo", "ipo_mean", "exo_pair", "nca_pair", "bco_pair", "apo_zero",
    "apo_down", "sppo_hard", "aot", "aot_unpaired", "discopop",
)
"""DPO and its relatives: the names of `jaxalign.algorithms.direct_preference.DPO_KINDS`."""
DIRECT_OBJECTIVES = (*PAIRWISE_OBJECTIVES, "kto", "orpo", "cpo", "simpo")


@dataclasses.dataclass(frozen=True)
class Dpo(Section):
    """Direct preference optimisation: the policy learns from labelled pairs, without a preference model."""

    objective: str = field("sigmoid", "The loss, or a sum of pairwise ones, as in sigmoid+bco_pair; docs/algorithms has each "
                           "one's formula and source.", sum_of(*DIRECT_OBJECTIVES))
    weights: tuple[float, ...] = field((), "Weight of each objective of a sum, in its order; empty: 1 each.")
    beta: float = field(0.1, "Weight of the implicit KL; the temperature of the implicit reward.", above(0))
    label_smoothing: float = field(0.0, "Share of labels taken to be wrong; conservative, robust and exo_pair need "
                                   "it above 0.", between(0.0, 0.499))
    margin: float = field(0.5, "Target margin (simpo: gamma).", at_least(0))
    desirable_weight: float = field(1.0, "Weight of good answers (kto).", at_least(0))
    undesirable_weight: float = field(1.0, "Weight of bad answers (kto).", at_least(0))
    sft_weight: float | None = field(None, "Weight of the better answer's negative log-likelihood a token, beside the "
                                     "objective; None: 1 for orpo and cpo, else 0.", at_least(0))
    reference: str = field("start", "The reference: the weights this stage starts from, or none (its log-probs are 0).",
                           one_of("start", "none"))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    batch: int = field(32, "Pairs of a step; for kto, answers.", at_least(1))
    max_length: int = field(256, "Longest dialogue with its answer; longer ones lose their oldest tokens.", at_least(8))
    held_out_share: float = field(0.15, "Share of the world's pairs kept for accuracy; a file has data.held_out_share.",
                                   between(0.0, 0.9))
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(50, "Steps between checkpoints.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens of packed pairs that a device computes at once; results are the same. 0: "
                                    "a sixteenth of what a batch could need, at least 768.", at_least(0))

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        self.check_objective(config)

    def check_objective(self, config: WholeConfig) -> None:
        """Checks what an objective, or each part of a sum, needs from the other fields; online_dpo reads them too."""
        parts = names_in(self.objective)
        if "comparisons" not in data_source(config).provides and self.objective != "kto":
            raise UserError(f"config.dpo.objective is {self.objective!r}, which learns from pairs; config.data.source "
                            f"{config.data.source!r} has single answers: set dpo.objective to 'kto', or data.source to "
                            "'preferences_jsonl'")
        alone = [part for part in parts if part in ("kto", "orpo", "cpo", "simpo")]
        if alone and len(parts) > 1:
            raise UserError(f"config.dpo.objective is {self.objective!r}; {alone[0]!r} cannot be part of a sum: DPO and its "
                            "relatives can")
        self._check_weights(parts)
        if self.label_smoothing and alone:
            raise UserError(f"config.dpo.label_smoothing is {self.label_smoothing}; objective {self.objective!r} has no such "
                            "setting: leave it at 0")
        smoothed = [part for part in parts if part in ("conservative", "robust", "exo_pair")]
        if smoothed and self.label_smoothing == 0:
            raise UserError(f"config.dpo.label_smoothing is 0; objective {smoothed[0]!r} needs it above 0 (0.1, say)")
        if any(part.startswith("aot") for part in parts) and self.micro_batch_tokens:
            raise UserError(f"config.dpo.micro_batch_tokens is {self.micro_batch_tokens}; objective {self.objective!r} sorts "
                            "the whole batch, which is computed at once: leave it at 0")

    def _check_weights(self, parts: tuple[str, ...]) -> None:
        if self.weights and len(self.weights) != len(parts):
            raise UserError(f"config.dpo.weights has {len(self.weights)} entries; config.dpo.objective {self.objective!r} has "
                            f"{len(parts)}: give one weight each, or none")
        if any(weight < 0 for weight in self.weights):
            raise UserError(f"config.dpo.weights is {self.weights}; a weight must be at least 0")
        if self.weights and len(parts) == 1:
            raise UserError(f"config.dpo.weights is {self.weights}; objective {self.objective!r} is no sum: leave it empty")
