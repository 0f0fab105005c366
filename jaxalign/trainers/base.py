"""What every trainer shares: steps and the conversion of data."""

from __future__ import annotations

from jaxalign.trainers.rows import as_examples, as_judgements, as_pairs, as_prompts, require_equal_lengths
from jaxalign.training.loop import Step

__all__ = ["Step", "as_examples", "as_judgements", "as_pairs", "as_prompts", "require_equal_lengths"]
