"""Stage online_dpo: direct preference objectives on newly sampled pairs."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.shared import Optimizer, SamplingFields, Trained
from jaxalign.errors import UserError
from jaxalign.registry.core import names_in
from jaxalign.registry.objectives import OBJECTIVES


@dataclasses.dataclass(frozen=True)
class OnlineChecks(Section):
    """What happens if a check of online_dpo fails: warn, or stop the run."""

    sampler_gap: str = field("warn", "At step 0, the sampler's log-probabilities differ from the trainer's.",
                             one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is skipped in either case.",
                                  one_of("warn", "stop"))


@dataclasses.dataclass(frozen=True)
class OnlineDPOConfig(SamplingFields, Trained):
    """Direct preference optimisation on new pairs: the policy answers each prompt twice, and the labeller compares the answers.
    The objective and its settings are in config.dpo."""

    iterations: int = field(40, "Rounds of sampling, labelling and training.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader cycles through them.", at_least(1))
    batch: int = field(64, "Prompts per iteration, each answered twice.", between(1, 1 << 20))
    epochs: int = field(1, "Passes over the pairs of an iteration.", at_least(1))
    minibatches: int = field(1, "Optimizer steps per pass; sampling is split into the same number of parts.", at_least(1))
    reference: str = field("start", "The reference: the weights that this stage starts from, or the policy at the start of the "
                           "iteration (iterative DPO). dpo.reference=none takes precedence.", one_of("start", "iteration"))
    required_share: float = field(0.0, "Stop if a smaller share of an iteration's pairs can be trained on. Below 0.05 the run "
                                  "warns.", between(0.0, 1.0))
    sampler_tolerance: float = field(0.0, "Largest allowed difference between the sampler's and the trainer's log-prob of a "
                                     "token; 0: 1e-3 in float32, 0.0625 in TensorFloat-32 and float16, 0.5 in bfloat16.",
                                     at_least(0))
    checks: OnlineChecks = section(OnlineChecks(), "")
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear"), "The stage's optimizer.")
    checkpoint_every: int = like(Trained, "checkpoint_every", default=5, doc="Iterations between checkpoints.")

    def check(self, config: WholeConfig, name: str) -> None:
        if self.top_k == 1:
            raise UserError("config.online_dpo.top_k is 1, which makes both answers to a prompt equal, so no pair could be "
                            "trained on: raise top_k, or set it to 0, which samples from all tokens")
        config.dpo.check_terms()
        objective = config.dpo.objective
        if not all(OBJECTIVES.get(part, "config.dpo.objective").pairs for part in names_in(objective)):
            raise UserError(f"config.dpo.objective is {objective!r}, which trains on single answers, but stage online_dpo has "
                            "pairs: choose another objective")
