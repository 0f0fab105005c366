"""Stage reward_distill: a smaller reward model."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.model import check_heads
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.errors import UserError


@dataclasses.dataclass(frozen=True)
class RewardDistill(Section):
    """A smaller reward model, the student, that learns the scores of the preference model, its teacher."""

    layers: int = field(2, "Decoder layers.", at_least(1))
    embed: int = field(64, "Width of the residual stream.", at_least(1))
    heads: int = field(2, "Query heads.", at_least(1))
    kv_heads: int = field(1, "Key/value heads; they must divide the query heads.", at_least(1))
    head_dim: int = field(32, "Width of a head; even, for the rotary positions.", at_least(2))
    mlp: int = field(176, "Width of the gated MLP.", at_least(1))
    start: str = field("random", "Random weights, or the teacher's embedding, first layers and head (all sizes but layers "
                       "must then be the model's).", one_of("random", "teacher"))
    objective: str = field("regression", "Meet the teacher's scores, or its probability for each pair, or both.",
                           one_of("regression", "pairs", "both"))
    prompts: int = field(1024, "Prompts answered afresh, to be scored.", at_least(1))
    samples: int = field(4, "Answers to each prompt; even, they make pairs.", at_least(2))
    batch: int = field(128, "Answers of a chunk, a multiple of samples; as many rows decode together. Up to 4 "
                            "chunks are one queue. Speed is measured on as many.", at_least(1))
    temperature: float = field(1.0, "Sampling temperature.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    max_new_tokens: int = field(60, "Longest answer.", at_least(1))
    held_out_share: float = field(0.15, "Share of the prompts kept for the agreement with the teacher.",
                                  between(0.001, 0.9))
    epochs: int = field(4, "Passes over the pairs.", at_least(1))
    batch_pairs: int = field(32, "Pairs of a step.", at_least(1))
    optimizer: Optimizer = section(Optimizer(learning_rate=2e-3, schedule="linear", warmup_steps=10), "Its optimizer.")
    checkpoint_every: int = field(100, "Steps between checkpoints.", at_least(1))
    micro_batches: int = field(1, "Parts a step is computed in, to save memory; results are the same.", at_least(1))

    def check(self, config: WholeConfig, name: str) -> None:
        check_heads(self, name)
        if self.samples % 2:
            raise UserError(f"config.reward_distill.samples is {self.samples}; answers are compared in pairs, so it must be "
                            "even")
        if self.start == "teacher":
            self._check_sizes(config)

    def _check_sizes(self, config: WholeConfig) -> None:
        """With start=teacher the sizes are the teacher's. Those of an outside teacher are known only once it is read."""
        if config.model.source == "huggingface":
            return
        for size in ("embed", "heads", "kv_heads", "head_dim", "mlp"):
            own, teachers = getattr(self, size), getattr(config.model, size)
            if own != teachers:
                raise UserError(f"config.reward_distill.{size} is {own} and config.model.{size} is {teachers}; with start "
                                "'teacher' they must be equal: make them equal, or start from 'random'")
        if self.layers > config.model.layers:
            raise UserError(f"config.reward_distill.layers is {self.layers}; with start 'teacher' it must be at most "
                            f"config.model.layers ({config.model.layers})")
