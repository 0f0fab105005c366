"""Admission, and asynchronous schedules against the synchronous ones and their bounds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.planner.asynchronous import Rollouts, asynchronous, capacity
from jaxalign.planner.generation_time import DecodeStep, batch_seconds, lognormal_lengths, refill_throughput
from jaxalign.planner.schedules import TaskTimes, separate

LENGTHS = lognormal_lengths(64, mean=300, spread=0.8, cap=900, seed=1)
STEP = DecodeStep(least=1e-2, per_row=1e-3)
ROLLOUTS = Rollouts(LENGTHS, STEP, slots=64, batch=64)
TIMES = TaskTimes(generate=0, policy_update=10, transfer=1)


@pytest.mark.parametrize(("concurrency", "running", "eta", "version", "batch", "accepted", "admitted"), [
    (100, 0, 2, 0, 4, 0, 12), (100, 0, 2, 5, 4, 0, 32), (10, 3, 2, 0, 4, 0, 7), (20, 0, 2, 0, 4, 5, 7),
    (100, 0, 10, 0, 32, 0, 100), (100, 4, 0, 0, 4, 0, 0), (1000, 0, 0.5, 0, 512, 512, 256),
])
def test_admission(concurrency, running, eta, version, batch, accepted, admitted):
    """The first five are AReaL's worked numbers; then a full synchronous batch, and half a batch ahead."""
    assert capacity(concurrency, running, eta, version, batch, accepted) == admitted


@pytest.mark.parametrize("interruptible", [True, False])
def test_without_staleness_asynchronous_is_synchronous(interruptible):
    times = dataclasses.replace(TIMES, generate=batch_seconds(LENGTHS, 64, STEP).seconds)
    schedule, synchronous = asynchronous(TIMES, 6, ROLLOUTS, 0, interruptible), separate(times, 6)
    assert schedule.update_ends == pytest.approx(synchronous.update_ends)
    assert schedule.idle["training"] == pytest.approx(synchronous.idle["training"])
    assert schedule.idle["generation 0"] == pytest.approx(synchronous.idle["generation"], abs=0.01)  # No load after the last.
    assert schedule.staleness == {0: 1}


def test_one_step_ahead_without_interruption_overlaps_whole_batches():
    """Generation and the load of the weights take longer than the update."""
    schedule = asynchronous(TIMES, 12, ROLLOUTS, 1, interruptible=False)
    assert schedule.seconds_per_update == pytest.approx(batch_seconds(LENGTHS, 64, STEP).seconds + 1)
    assert schedule.staleness[1] == pytest.approx(11 / 12)


def test_a_run_by_hand():
    """One second a step, an update of one second, two slots, responses of 1 and 3 tokens in turn, batches of two, eta 1.

    At 2 s samples 0 and 2 have ended and are trained. Samples 1 and 4 have ended at 4 s, but sample 3, which the first weights
    began too, must be in the same update, and ends at 5 s. Samples 4 and 5, begun by version 1, are complete at 7 s.
    """
    rollouts = Rollouts([1, 3], DecodeStep(1.0, 0.0), slots=2, batch=2)
    schedule = asynchronous(TaskTimes(0, policy_update=1), 3, rollouts, 1)
    assert schedule.update_ends == (3, 6, 8)
    assert schedule.staleness == {0: 2 / 6, 1: 4 / 6} and schedule.idle == {"generation 0": 0, "training": 5 / 8}


def test_enough_staleness_reaches_the_throughput_of_full_slots():
    """64 samples at full slots take 16.03 s, and each update interrupts them for 1 s."""
    assert 64 / refill_throughput(LENGTHS, 64, STEP) == pytest.approx(16.03, abs=0.01)
    schedule = asynchronous(TIMES, 60, ROLLOUTS, 8)
    assert schedule.seconds_per_update == pytest.approx(17.03, rel=0.03)
    assert schedule.idle["generation 0"] < 0.01
    waiting = asynchronous(TIMES, 60, ROLLOUTS, 8, interruptible=False)
    assert waiting.seconds_per_update > 1.05 * schedule.seconds_per_update  # Slots run empty before each load.


def test_training_limits_fast_generators():
    schedule = asynchronous(dataclasses.replace(TIMES, reference=4, policy_update=40), 20, ROLLOUTS, 4)
    assert schedule.seconds_per_update == pytest.approx(4 + 40 + 1) and schedule.idle["training"] < 0.05


def test_groups_share_the_rollouts():
    """Two groups of half the slots, each twice as slow per row, are one group."""
    halves = dataclasses.replace(ROLLOUTS, slots=32, groups=2, step=DecodeStep(1e-2, 2e-3))
    one, two = (asynchronous(TIMES, 40, rollouts, 4) for rollouts in (ROLLOUTS, halves))
    assert two.seconds_per_update == pytest.approx(one.seconds_per_update, rel=0.03)
    assert {"generation 0", "generation 1"} < set(two.idle)


def test_mini_batches_overlap_training_with_a_synchronous_batch():
    schedule = asynchronous(TIMES, 6, dataclasses.replace(ROLLOUTS, mini_batches=4), 0)
    last = batch_seconds(LENGTHS, 64, STEP).seconds
    assert last + 10 / 4 + 1 <= schedule.seconds_per_update + 1e-9 < last + 10 + 1
    assert schedule.staleness == {0: 1}


def test_recomputed_caches_and_small_concurrency_cost_time():
    base = asynchronous(TIMES, 30, ROLLOUTS, 4).seconds
    assert asynchronous(TIMES, 30, dataclasses.replace(ROLLOUTS, recompute=2.0), 4).seconds > base
    assert asynchronous(TIMES, 30, dataclasses.replace(ROLLOUTS, concurrency=4), 4).seconds > base


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), eta=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 3, 5]),
    slots=st.integers(1, 12), groups=st.integers(1, 3), batch=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (8, 8)]),
    update=st.integers(0, 60), transfer=st.integers(0, 5), interruptible=st.booleans(),
    concurrency=st.sampled_from([None, 1, 5]),
)
def test_staleness_never_exceeds_eta(lengths, eta, slots, groups, batch, update, transfer, interruptible, concurrency):
    rollouts = Rollouts(lengths, DecodeStep(1.0, 0.2), slots, batch[0], groups, concurrency, batch[1], recompute=1.0)
    times = TaskTimes(0, policy_update=update, transfer=transfer)
    schedule = asynchronous(times, 12, rollouts, eta, interruptible)
    assert max(schedule.staleness) <= -(-eta // 1) and sum(schedule.staleness.values()) == pytest.approx(1)
    assert schedule.seconds >= 12 * (update + transfer) - 1e-6
    assert list(schedule.update_ends) == sorted(schedule.update_ends)
    assert all(0 <= share <= 1 for share in schedule.idle.values())


@pytest.mark.parametrize(("change", "eta", "words"), [
    ({"batch": 0}, 1, "batch is 0"), ({"mini_batches": 3}, 1, "does not divide"), ({}, -1, "eta is -1"),
    ({"lengths": []}, 1, "number of lengths is 0"), ({"groups": 0}, 1, "groups is 0"),
    ({"concurrency": 0}, 1, "concurrency is 0"),
])
def test_errors(change, eta, words):
    with pytest.raises(UserError, match=words):
        asynchronous(TIMES, 1, dataclasses.replace(ROLLOUTS, **change), eta)
