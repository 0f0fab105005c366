"""Stage reward_distill: a smaller reward model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import WholeConfig
from jaxalign.config.constraints import at_least, between, one_of
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.shared import DecoderSizes, Optimizer, SamplingFields, Trained
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class RewardDistillConfig(DecoderSizes, SamplingFields, Trained):
    """A smaller reward model (the student), trained on the scores of the preference model (its teacher)."""

    layers: int = like(DecoderSizes, "layers", default=2)
    embed: int = like(DecoderSizes, "embed", default=64)
    heads: int = like(DecoderSizes, "heads", default=2)
    kv_heads: int = like(DecoderSizes, "kv_heads", default=1)
    head_dim: int = like(DecoderSizes, "head_dim")
    mlp: int = like(DecoderSizes, "mlp", default=176)
    start: str = field("random", "Start from random weights, or from the teacher's embedding, first layers and head; with "
                       "teacher, all sizes except layers must equal those of model.", one_of("random", "teacher"))
    objective: str = field("regression", "Fit the teacher's scores (regression), its probability for each pair (pairs), or "
                           "both.", one_of("regression", "pairs", "both"))
    prompts: int = field(1024, "Number of prompts to answer for the student's training.", at_least(1))
    samples: int = field(4, "Answers per prompt; an even number, because they form pairs.", at_least(2))
    batch: int = field(128, "Answers per chunk, a multiple of samples; also the number of rows decoded together. Up to 4 "
                       "chunks form one queue. Speed is measured on a batch of this size.", at_least(1))
    held_out_share: float = field(0.15, "Fraction of the prompts held out to measure agreement with the teacher.",
                                  between(0.001, 0.9))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    batch_pairs: int = field(32, "Pairs per step.", at_least(1))
    micro_batches: int = field(1, "Number of parts a step is split into to save memory; results do not depend on it.",
                               at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-3, schedule="linear", warmup_steps=10),
                                   "The stage's optimizer.")
    checkpoint_every: int = like(Trained, "checkpoint_every", default=100)

    def check(self, config: WholeConfig, name: str) -> None:
        self.check_heads(name)
        if self.samples % 2:
            raise UserError(f"config.reward_distill.samples is {self.samples}; answers are compared in pairs, so it must be "
                            "even")
        if self.start == "teacher":
            self._check_sizes(config)

    def _check_sizes(self, config: WholeConfig) -> None:
        """Checks that the student has the teacher's sizes, for start=teacher. A checkpoint's sizes are unknown until it is
        read."""
        if config.model.source == "huggingface":
            return
        for size in ("embed", "heads", "kv_heads", "head_dim", "mlp"):
            own, teachers = getattr(self, size), getattr(config.model, size)
            if own != teachers:
                raise UserError(f"config.reward_distill.{size} is {own} and config.model.{size} is {teachers}; with start "
                                "'teacher' they must be equal: change one of them, or set start to 'random'")
        if self.layers > config.model.layers:
            raise UserError(f"config.reward_distill.layers is {self.layers}; with start 'teacher' it must be at most "
                            f"config.model.layers ({config.model.layers})")
