"""A sentence on learning rates that hardly change the weights. Training logs it, and the report shows it."""

from __future__ import annotations

from jaxalign.tracking.formatting import percent

_LEAST_PEAK = 0.9
"""A warm-up that ends training at a smaller share of the peak learning rate needs a warning."""


def low_rate_sentence(learning_rate: float, warmup_steps: int, steps: int) -> str | None:
    """A sentence if the learning rate is 0, or if training ends long before its warm-up; else None.

    Args:
      learning_rate: the peak learning rate.
      warmup_steps: the steps of linear warm-up.
      steps: the steps of training.
    """
    if learning_rate == 0:
        return "the learning rate is 0, so no weight changes"
    reached = steps / max(1, warmup_steps)
    if reached >= _LEAST_PEAK:
        return None
    return (f"the warm-up has {warmup_steps:,} steps but training {steps:,}, so the learning rate reaches only "
            f"{percent(reached)} of its peak; lower warmup_steps")
