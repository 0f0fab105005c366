"""Stage dpo: direct preference objectives."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig, check_dialogue_length
from jaxalign.config.constraints import above, at_least, between, one_of, registered
from jaxalign.config.reading import chosen, refuse_unread, require_fields
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.shared import Optimizer, PackedPairs
from jaxalign.errors import UserError
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.objectives import OBJECTIVES, Objective
from jaxalign.registry.stages import made_before

_OBJECTIVE = chosen("objective", OBJECTIVES)


@dataclasses.dataclass(frozen=True)
class DPOConfig(PackedPairs):
    """Direct preference optimisation: the policy is trained on labelled pairs, without a preference model."""

    objective: str = field("sigmoid", "The loss, or a sum of pairwise losses such as sigmoid+bco_pair; docs/algorithms has the "
                           "formula and source of each.", registered(OBJECTIVES, sums=True))
    weights: tuple[float, ...] = field((), "Weights of the objectives in a sum, in the same order; empty: 1 each.")
    beta: float = field(0.1, "Strength of the implicit KL penalty; scales the implicit reward.", above(0))
    label_smoothing: float = field(0.0, "Assumed fraction of wrong labels; conservative, robust and exo_pair need it above 0.",
                                   between(0.0, 0.499), _OBJECTIVE)
    margin: float = field(0.5, "Target margin (simpo: gamma).", at_least(0), _OBJECTIVE)
    desirable_weight: float = field(1.0, "Weight of good answers (kto).", at_least(0), _OBJECTIVE)
    undesirable_weight: float = field(1.0, "Weight of bad answers (kto).", at_least(0), _OBJECTIVE)
    sft_weight: float | None = field(None, "Weight of the chosen answer's negative log-likelihood per token, added to the "
                                     "objective; None: 1 for orpo and cpo, else 0.", at_least(0))
    reference: str = field("start", "The reference: the weights that this stage starts from (start), or none (log-probs of 0).",
                           one_of("start", "none"))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    steps: int = field(0, "Number of steps; 0: as many as the epochs need, which is an estimate with data.window.", at_least(0))
    batch: int = like(PackedPairs, "batch", doc="Pairs per step; for kto, answers.")
    max_length: int = like(PackedPairs, "max_length", doc="Maximum length of a dialogue with its answer, in tokens; longer "
                           "dialogues lose their oldest tokens.")
    held_out_share: float = like(PackedPairs, "held_out_share", doc="Fraction of the pairs of compare held out to "
                                 "measure accuracy; for files, data.held_out_share applies.")
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear", warmup_steps=10), "The stage's optimizer.")

    def check(self, config: WholeConfig, name: str) -> None:
        check_dialogue_length(self, config, name)
        self.check_terms()
        pairwise = any(OBJECTIVES.get(part).pairs for part in names_in(self.objective))
        if pairwise and "comparisons" not in made_before(config.stages, "dpo").union(data_source(config).provides):
            raise UserError(f"config.dpo.objective is {self.objective!r}, which needs pairs; config.data.source "
                            f"{config.data.source!r} has single answers: set dpo.objective to 'kto', or data.source to "
                            "'preferences_jsonl', or add compare to config.stages")

    def check_terms(self) -> None:
        """Checks the requirements of the objective, or of each term of a sum, on the other fields of this section. online_dpo
        also uses it."""
        refuse_unread(self, type(self)(), "dpo", lambda dotted: getattr(self, dotted.removeprefix("dpo.")))
        parts = tuple(OBJECTIVES.get(part, "config.dpo.objective") for part in names_in(self.objective))
        alone = [part.name for part in parts if not part.summable]
        if alone and len(parts) > 1:
            raise UserError(f"config.dpo.objective is {self.objective!r}; {alone[0]!r} cannot be part of a sum: only DPO and "
                            "its variants can")
        for part in parts:
            require_fields(part, "objective", self, "dpo")
        self._check_weights(parts)
        for part in parts:
            if part.smoothing_required and self.label_smoothing == 0:
                raise UserError(f"config.dpo.label_smoothing is 0; objective {part.name!r} needs it above 0, for example 0.1")
            if part.needs_reference and self.reference == "none":
                raise UserError(f"config.dpo.reference is 'none'; objective {part.name!r} is undefined without a reference: "
                                "set it to 'start'")
            if part.sorts_the_batch and self.micro_batch_tokens:
                raise UserError(f"config.dpo.micro_batch_tokens is {self.micro_batch_tokens!r}; objective {self.objective!r} "
                                "sorts the whole batch and needs it in one micro-batch: leave it at 0")

    def _check_weights(self, parts: tuple[Objective, ...]) -> None:
        if self.weights and len(parts) == 1:
            raise UserError(f"config.dpo.weights is {self.weights}; objective {self.objective!r} is not a sum: leave it empty")
        if self.weights and len(self.weights) != len(parts):
            raise UserError(f"config.dpo.weights has {len(self.weights)} entries; config.dpo.objective {self.objective!r} has "
                            f"{len(parts)}: give one weight each, or none")
        if any(weight < 0 for weight in self.weights):
            raise UserError(f"config.dpo.weights is {self.weights}; a weight must be at least 0")
