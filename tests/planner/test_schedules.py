"""Schedules of an iteration, worked by hand, and properties over random times."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.planner.schedules import GenerationTail, TaskTimes, asynchronous_depth, flat, interleave, one_step_ahead, separate

TIMES = TaskTimes(generate=60, reference=3, rewards=(2, 4), value=5, advantages=1, policy_update=10, critic_update=8,
                  transfer=2)


def test_flat_runs_every_task_in_turn():
    schedule = flat(TIMES, updates=4)
    assert schedule.seconds_per_update == 95 and schedule.seconds == 380
    assert schedule.idle == {"all": 0} and schedule.staleness == {0: 1}


def test_interleaved_passes_take_the_slowest_part():
    """Scoring costs the sum of its passes on shared devices and their maximum on exclusive parts."""
    assert interleave(TIMES, 3).seconds_per_update == 95 - (3 + 2 + 4 + 5) + 5
    assert interleave(TIMES, 3, [["reference", "reward 0"], ["reward 1", "value"]]).seconds_per_update == 95 - 14 + 9
    assert interleave(TIMES, 3, [["reference", "reward 0", "reward 1", "value"]]).seconds_per_update == 95


def test_interleaved_updates_in_turn_or_side_by_side():
    assert interleave(TIMES, 3, side_by_side=2).seconds_per_update == 86 - 8
    schedule = interleave(TIMES, 3)
    assert schedule.idle["part 3"] == 0 and schedule.idle["part 1"] == pytest.approx(3 / 86)  # Reward 1 takes 2 of 5 seconds.


def test_separate_groups_wait_for_each_other():
    schedule = separate(TIMES, 5)
    assert schedule.seconds_per_update == 95
    assert schedule.idle == pytest.approx({"generation": 19 / 95, "training": 74 / 95})


def test_the_tail_hides_the_scores_of_finished_responses():
    """Half of the devices are free for 30 s: the passes over 90% of 14 s of work take 25.2 s there; 1.4 s remain."""
    schedule = separate(TIMES, 4, tail=GenerationTail(seconds=30, unfinished=0.1, freed=0.5))
    assert schedule.seconds_per_update == pytest.approx(95 - 14 + 1.4)
    short = separate(TIMES, 4, tail=GenerationTail(seconds=10, unfinished=0.1, freed=0.5))
    assert short.seconds_per_update == pytest.approx(95 - 10 * 0.5)
    assert separate(TIMES, 4, tail=GenerationTail(0, 0, 1)).seconds_per_update == pytest.approx(95)


def test_one_step_ahead_takes_the_longer_side():
    schedule = one_step_ahead(TIMES, 10)
    assert schedule.seconds_per_update == max(60 + 14, 19) + 2
    assert one_step_ahead(TIMES, 10, scoring="training").seconds_per_update == max(60, 14 + 19) + 2
    assert schedule.staleness == {0: 0.1, 1: 0.9}  # No update precedes the first batch.
    timeline = schedule.timeline
    assert timeline["generate 3"].start >= timeline["transfer 1"].end  # Batch 3 is sampled with the weights of update 1,
    assert timeline["generate 3"].start < timeline["policy update 2"].start  # while batch 2 is trained.


def test_the_cost_algebra():
    """Scoring is the sum if co-located and the maximum if apart; an iteration takes the longer of its two sides."""
    free = TaskTimes(60, 3, (2, 4), 5, 1, 10, 8)
    assert asynchronous_depth(60, sum(free.scoring.values()), free.training) == 74 == one_step_ahead(free, 9).seconds_per_update
    slow = free.scaled(training=5)
    assert asynchronous_depth(60, 14, slow.training) == 95 == one_step_ahead(slow, 9).seconds_per_update
    assert asynchronous_depth(60, max(free.scoring.values()), 19) == 65


def test_scaled_times_keep_the_transfer():
    assert TIMES.scaled(2, 3, 4) == TaskTimes(120, 9, (6, 12), 15, 4, 40, 32, 2)


def test_a_schedule_of_one_update_is_its_depth():
    assert flat(TIMES, 1).seconds_per_update == one_step_ahead(TIMES, 1).seconds == 95


@pytest.mark.parametrize(("call", "words"), [
    (lambda: flat(TIMES, 0), "updates is 0"),
    (lambda: interleave(TIMES, 1, [["reference"]]), "place each pass on exactly one part"),
    (lambda: interleave(TIMES, 1, side_by_side=4), "side_by_side is 4 of 4 parts"),
    (lambda: separate(TIMES, 1, tail=GenerationTail(61, 0.1, 0.5)), "the tail is"),
    (lambda: separate(TIMES, 1, "training", GenerationTail(1, 0.1, 0.5)), "needs the generation group"),
])
def test_errors(call, words):
    with pytest.raises(UserError, match=words):
        call()


SECONDS = st.integers(0, 50)
ITERATIONS = st.builds(TaskTimes, SECONDS, SECONDS, st.lists(SECONDS, max_size=3).map(tuple), SECONDS, SECONDS, SECONDS,
                       SECONDS, SECONDS)


@given(ITERATIONS, st.integers(1, 8), st.sampled_from(["generation", "training"]))
def test_one_step_ahead_is_never_slower_than_synchronous(times, updates, scoring):
    assert one_step_ahead(times, updates, scoring).seconds <= separate(times, updates, scoring).seconds


@pytest.mark.slow
@given(ITERATIONS, st.integers(1, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 1))
@example(TaskTimes(5, value=3), 1, 1.0, 0.0, 0.6989570600428717)  # 3 / 0.69... * 0.69... is above 3.
def test_scoring_in_the_tail_is_never_slower_than_after_it(times, updates, part, unfinished, freed):
    tail = GenerationTail(part * times.generate, unfinished, freed)
    assert separate(times, updates, tail=tail).seconds <= separate(times, updates).seconds + 1e-6


@given(ITERATIONS, st.integers(1, 5))
def test_parts_are_never_slower_than_one_group_with_the_same_times(times, updates):
    assert interleave(times, updates).seconds <= flat(times, updates).seconds
