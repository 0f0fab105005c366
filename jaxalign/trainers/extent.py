"""Warnings about training that changes little: few of the rows are read, or the learning rate stays far below its peak."""

from __future__ import annotations

import logging

import optax

from jaxalign.config import Optimizer
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.parallel import hosts
from jaxalign.reasons import MOSTLY
from jaxalign.tracking.formatting import percent

_LEAST_PEAK = 0.9
"""A warm-up that ends training at a smaller share of the peak learning rate needs a warning."""


def read_share(rows: int, batch: int, steps: int) -> float:
    """The share of the rows that so many steps read, at most 1."""
    return min(1.0, steps * batch / rows)


def rows_warning(loader: EpochLoader | InOrder, steps: int) -> str | None:
    """A sentence if the steps read less than half of the rows of a loader; None for rows that are made on demand."""
    if not isinstance(loader, EpochLoader) or (share := read_share(loader.rows, loader.batch, steps)) >= MOSTLY:
        return None
    return (f"training reads {steps * loader.batch:,} of {loader.rows:,} rows ({percent(share)}); raise steps or epochs to "
            "read more")


def schedule_warning(optimizer: Optimizer | optax.GradientTransformation, steps: int) -> str | None:
    """A sentence if the learning rate is 0, or if training ends long before its warm-up; None for a user's optimizer."""
    if not isinstance(optimizer, Optimizer):
        return None
    if optimizer.learning_rate == 0:
        return "the learning rate is 0, so no weight changes"
    reached = steps / max(1, optimizer.warmup_steps)
    if reached >= _LEAST_PEAK:
        return None
    return (f"the warm-up has {optimizer.warmup_steps:,} steps but training {steps:,}, so the learning rate reaches only "
            f"{percent(reached)} of its peak; lower warmup_steps")


def warn_of_extent(stage: str, *sentences: str | None) -> None:
    """Logs the sentences that are not None as warnings of a stage, in the first process."""
    for sentence in sentences:
        if sentence and hosts.is_first():
            logging.getLogger("jaxalign").warning(f"[{stage}] {sentence}")
