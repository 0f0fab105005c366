"""Predictions within 25% of published times. All rows, with those that fail, are in the docstring of published_schedules."""

from __future__ import annotations

import functools

import pytest
from planner import published_schedules as published


@functools.cache
def predictions() -> dict[str, float]:
    """Ratio of prediction to publication by row."""
    rows = [*published.verl_fully_asynchronous(), *published.verl_one_step_off(), published.areal_interruption("7B"),
            *published.marin(interruptible=False)]
    return {row.name: row.ratio for row in rows}


@pytest.mark.parametrize("name", [
    "verl fully asynchronous, 64 GPUs", "verl fully asynchronous, 128 GPUs", "verl 128 GPUs, threshold 0",
    "verl 128 GPUs, threshold 0.1", "verl 128 GPUs, threshold 0.3", "verl one step off, Megatron",
    "verl one step off, FSDP2, its own phases", "verl one step off, Megatron, its own phases", "AReaL 7B, gain of interruption",
    "marin 67B, staleness 1, waits", "marin 67B, staleness 2, waits", "marin 67B, staleness 3, waits",
    "marin 67B, staleness 4, waits",
])
def test_predictions_within_a_quarter_of_what_was_published(name):
    assert predictions()[name] == pytest.approx(1, abs=0.25)
