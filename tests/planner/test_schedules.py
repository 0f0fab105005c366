"""Schedules of an iteration, worked by hand, and properties over random times and task graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.planner.schedules import SimulatedTask, TaskTimes, flat, interleave, one_step_ahead, separate, simulate

TIMES = TaskTimes(generate=60, reference=3, rewards=(2, 4), value=5, advantages=1, policy_update=10, critic_update=8,
                  transfer=2)


def test_tasks_of_two_groups():
    assert simulate([
        SimulatedTask("generate", ("a", "b"), 10), SimulatedTask("reference", ("a",), 2, ("generate",)),
        SimulatedTask("reward", ("b",), 5, ("generate",)), SimulatedTask("update", ("a", "b"), 4, ("reference", "reward")),
    ]) == {"generate": 10, "reference": 12, "reward": 15, "update": 19}


def test_a_group_runs_its_tasks_in_order():
    """"ready" is after "waits" on its group, which starts at 5."""
    tasks = [SimulatedTask("long", ("x",), 5), SimulatedTask("waits", ("y",), 1, ("long",)), SimulatedTask("ready", ("y",), 3)]
    assert simulate(tasks) == {"long": 5, "waits": 6, "ready": 9}


@st.composite
def graphs(draw) -> list[SimulatedTask]:
    """Up to 12 tasks on 3 groups; each depends on earlier tasks only."""
    tasks = []
    for n in range(draw(st.integers(1, 12))):
        groups = tuple(draw(st.sets(st.sampled_from("xyz"), min_size=1)))
        after = tuple(f"t{i}" for i in sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))) if n else ()
        tasks.append(SimulatedTask(f"t{n}", groups, draw(st.integers(0, 9)), after))
    return tasks


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_a_task_starts_when_its_dependencies_and_its_groups_are_free(tasks):
    ends = simulate(tasks)
    for n, task in enumerate(tasks):
        before = [ends[one.name] for one in tasks[:n] if one.name in task.after or set(one.groups) & set(task.groups)]
        assert ends[task.name] - task.seconds == max(before, default=0)


def test_flat_runs_every_task_in_turn():
    schedule = flat(TIMES, updates=4)
    assert schedule.seconds_per_update == 95 and schedule.update_ends == (95, 190, 285, 380)


def test_interleaved_passes_take_the_slowest_part():
    """Scoring costs the sum of its passes on shared devices and their maximum on exclusive parts."""
    names = ["reference", "reward 0", "reward 1", "value"]
    assert interleave(TIMES, 3, [[name] for name in names]).seconds_per_update == 95 - (3 + 2 + 4 + 5) + 5
    assert interleave(TIMES, 3, [["reference", "reward 0"], ["reward 1", "value"]]).seconds_per_update == 95 - 14 + 9
    assert interleave(TIMES, 3, [names]).seconds_per_update == 95


def test_separate_groups_wait_for_each_other():
    assert separate(TIMES, 5).seconds_per_update == separate(TIMES, 5, "training").seconds_per_update == 95


def test_one_step_ahead_takes_the_longer_side():
    assert one_step_ahead(TIMES, 10).seconds_per_update == max(60 + 14, 19) + 2
    assert one_step_ahead(TIMES, 10, scoring="training").seconds_per_update == max(60, 14 + 19) + 2


@pytest.mark.parametrize(("phases", "published"), [((458, 108, 337), 520), ((501, 120, 347), 566)])
def test_one_step_ahead_is_near_the_published_times(phases, published):
    """verl, docs/advance/one_step_off.md: seconds of generation, log-probabilities and the update of both separate runs, and
    of their steps; weights take at most 0.3 s to transfer. The predictions are 458.3 and 501.3 s."""
    times = TaskTimes(phases[0], reference=phases[1], policy_update=phases[2], transfer=0.3)
    assert one_step_ahead(times, 8, scoring="training").seconds_per_update == pytest.approx(published, rel=0.25)


def test_a_schedule_of_one_update_has_every_task_in_turn():
    assert flat(TIMES, 1).seconds_per_update == one_step_ahead(TIMES, 1).seconds_per_update == 95


SECONDS = st.integers(0, 50)
ITERATIONS = st.builds(TaskTimes, SECONDS, SECONDS, st.lists(SECONDS, max_size=3).map(tuple), SECONDS, SECONDS, SECONDS,
                       SECONDS, SECONDS)


@given(ITERATIONS, st.integers(1, 8), st.sampled_from(["generation", "training"]))
def test_one_step_ahead_is_never_slower_than_synchronous(times, updates, scoring):
    assert one_step_ahead(times, updates, scoring).update_ends[-1] <= separate(times, updates, scoring).update_ends[-1]


@given(ITERATIONS, st.integers(1, 5))
def test_parts_are_never_slower_than_one_group_with_the_same_times(times, updates):
    parts = [[name] for name in times.scoring] or [[]]
    assert interleave(times, updates, parts).update_ends[-1] <= flat(times, updates).update_ends[-1]
