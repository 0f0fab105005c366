"""Stage online_dpo: direct preference objectives on fresh pairs."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source


@dataclasses.dataclass(frozen=True)
class OnlineChecks(Section):
    """What a failed check of online_dpo leads to: a warning, or the end of the run."""

    sampler_gap: str = field("warn", "At step 0, the sampler's log-probabilities are not the trainer's.",
                             one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is left out in any case.",
                                  one_of("warn", "stop"))


@dataclasses.dataclass(frozen=True)
class OnlineDpo(Section):
    """Direct preference optimisation on the policy's own fresh pairs, labelled as they come. The loss is that of `dpo`."""

    iterations: int = field(40, "Rounds of sampling, labelling and learning.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader goes round them.", at_least(1))
    batch: int = field(64, "Prompts of an iteration, each answered twice.", at_least(1))
    epochs: int = field(1, "Passes over the pairs of an iteration.", at_least(1))
    minibatches: int = field(1, "Optimizer steps a pass; sampling is in as many parts.", at_least(1))
    reference: str = field("start", "The reference: the weights this stage starts from, or the policy at the start of the "
                           "iteration (iterative DPO). dpo.reference=none comes first.", one_of("start", "iteration"))
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    sampler_tolerance: float = field(1e-3, "Largest gap of a token's log-prob between sampler and trainer.", above(0))
    checks: OnlineChecks = section(OnlineChecks(), "What a failed check leads to.")
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-4, schedule="linear"), "Its optimizer.")
    checkpoint_every: int = field(5, "Iterations between checkpoints.", at_least(1))

    def check(self, config: WholeConfig, name: str) -> None:
        config.dpo.check_objective(config)
        if config.dpo.objective == "kto":
            raise UserError("config.dpo.objective is 'kto', which learns from single answers; stage online_dpo has pairs: "
                            "choose another")
        if not data_source(config).feedback:
            raise UserError("stage online_dpo labels fresh pairs with the labeller, which knows only the embedded world; leave "
                            "it out of config.stages, or set config.data.source to 'world'")
