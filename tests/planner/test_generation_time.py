"""The time of a batch of responses, worked by hand and by a loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.planner.generation_time import DecodeStep, batch_seconds, lognormal_lengths, refill_throughput


def test_a_step_takes_the_larger_of_bandwidth_and_compute():
    step = DecodeStep(least=4.0, per_row=0.5)
    assert [step.seconds(rows) for rows in (1, 8, 16)] == [4, 4, 8]


def test_a_batch_by_hand():
    """Two slots, one second a step: 5 tokens in one slot; 2, then 1, then 4 in the other, which ends last."""
    batch = batch_seconds([5, 2, 1, 4], slots=2, step=DecodeStep(1.0, 0.0))
    assert batch.ends.tolist() == [5, 2, 3, 7] and batch.seconds == 7
    assert batch.occupied == 12 / 14  # 12 tokens in 7 steps of 2 slots.


def test_a_batch_that_fits_takes_the_steps_of_its_longest_response():
    batch = batch_seconds([10, 20, 1000], slots=3, step=DecodeStep(0.01, 0.0))
    assert batch.seconds == pytest.approx(10.0)
    assert batch.tail(1 / 3) == pytest.approx(9.8)  # The longest response runs on its own from token 20 to token 1000.
    assert batch.tail(1) == batch.seconds and batch.tail(0) == 0


def test_rows_that_end_make_the_steps_of_the_others_faster():
    assert batch_seconds([1, 3], slots=2, step=DecodeStep(0.0, 1.0)).seconds == 2 + 2 * 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5),
       st.sampled_from([(1.0, 0.0), (1.0, 0.5), (0, 1.0)]))
def test_a_batch_agrees_with_a_loop_over_tokens(lengths, slots, step):
    waiting, active, clock = list(lengths), [], 0.0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append(waiting.pop(0))
        clock += max(step[0], step[1] * len(active))
        active = [left - 1 for left in active if left > 1]
    assert batch_seconds(lengths, slots, DecodeStep(*step)).seconds == pytest.approx(clock)


def test_refilled_slots_reach_the_throughput_of_full_steps():
    """20,000 responses in one queue keep 50 slots full almost throughout; batches of 50 are half empty."""
    lengths, step = lognormal_lengths(20_000, mean=100, spread=0.8, cap=300), DecodeStep(0.01, 1e-4)
    queue = len(lengths) / batch_seconds(lengths, 50, step).seconds
    assert queue == pytest.approx(refill_throughput(lengths, 50, step), rel=0.02)
    batches = [batch_seconds(lengths[n:n + 50], 50, step) for n in range(0, 2000, 50)]
    assert 50 / np.mean([batch.seconds for batch in batches]) < 0.5 * queue


def test_lengths_follow_the_stated_distribution():
    lengths = lognormal_lengths(200_000, mean=1000, spread=0.5, cap=10**9, seed=3)
    assert lengths.mean() == pytest.approx(1000, rel=0.01) and np.log(lengths).std() == pytest.approx(0.5, rel=0.01)
    assert lognormal_lengths(1000, 1000, 1.0, cap=1500).max() == 1500
    assert (lognormal_lengths(5, 40, 0.0, cap=100) == 40).all()
    assert (lognormal_lengths(9, 50, 1.0, 99, seed=1) == lognormal_lengths(9, 50, 1.0, 99, seed=1)).all()


def test_errors():
    with pytest.raises(UserError, match="slots is 0"):
        batch_seconds([1], 0, DecodeStep(1, 0))
    with pytest.raises(UserError, match="spread -1"):
        lognormal_lengths(1, 10, -1, 10)
