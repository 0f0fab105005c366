"""Timelines worked by hand, and properties of random task graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.planner.simulator import SimulatedTask, simulate, stage_latency


def test_a_timeline_of_two_groups():
    timeline = simulate([
        SimulatedTask("generate", ("a", "b"), 10), SimulatedTask("reference", ("a",), 2, ("generate",)),
        SimulatedTask("reward", ("b",), 5, ("generate",)), SimulatedTask("update", ("a", "b"), 4, ("reference", "reward")),
    ])
    assert [(i.name, i.start, i.end) for i in timeline.intervals] == [
        ("generate", 0, 10), ("reference", 10, 12), ("reward", 10, 15), ("update", 15, 19)
    ]
    assert timeline.makespan == 19 and timeline.critical_path == ("generate", "reward", "update")
    assert (timeline.groups["a"].busy, timeline.groups["a"].idle) == (16, 3) and timeline.groups["b"].idle == 0
    assert timeline.groups["a"].idle_share == 3 / 19 and timeline["reward"].groups == ("b",)


def test_a_queue_keeps_its_order_and_a_priority_starts_what_is_ready():
    tasks = [SimulatedTask("long", ("x",), 5), SimulatedTask("waits", ("y",), 1, ("long",)), SimulatedTask("ready", ("y",), 3)]
    assert simulate(tasks).makespan == 9  # "ready" is enqueued after "waits", which starts at 5.
    timeline = simulate(tasks, order="priority")
    assert timeline.makespan == 6 and timeline["ready"].start == 0


def test_the_smaller_priority_number_starts_first_and_ties_keep_the_order():
    tasks = [SimulatedTask(name, ("x",), 1, priority=priority) for name, priority in (("c", 2), ("a", 1), ("b", 1))]
    timeline = simulate(tasks, order="priority")
    assert [timeline[name].start for name in "abc"] == [0, 1, 2]


def test_the_critical_path_includes_waiting_for_devices_and_the_depth_does_not():
    timeline = simulate([SimulatedTask("a", ("x",), 3), SimulatedTask("b", ("x",), 4)])
    assert timeline.critical_path == ("a", "b") and timeline.makespan == 7 and timeline.depth == 4


def test_no_tasks_take_no_time():
    timeline = simulate([])
    assert timeline.makespan == 0 and timeline.critical_path == () and timeline.groups == {}


@pytest.mark.parametrize("order", ["enqueued", "priority"])
@pytest.mark.parametrize(("tasks", "words"), [
    ([SimulatedTask("a", ("x",), 1, ("b",)), SimulatedTask("b", ("y",), 1, ("a",))], "tasks wait for each other: a -> b -> a"),
    ([SimulatedTask("a", ("x",), 1, ("a",))], "a -> a"),
    ([SimulatedTask("a", ("x",), 1, ("c",))], "depends on 'c', which is not a task"),
    ([SimulatedTask("a", ("x",), 1), SimulatedTask("a", ("x",), 1)], "two tasks are named 'a'"),
    ([SimulatedTask("a", (), 1)], "occupies no group"),
    ([SimulatedTask("a", ("x",), -1)], "takes -1 seconds"),
    ([SimulatedTask("a", ("x",), float("nan"))], "takes nan seconds"),
])
def test_errors_name_the_task(tasks, words, order):
    with pytest.raises(UserError, match=words):
        simulate(tasks, order)


def test_a_queue_that_contradicts_a_dependency_is_a_cycle_and_a_priority_is_not():
    tasks = [SimulatedTask("first", ("x",), 1, ("second",)), SimulatedTask("second", ("x",), 1)]
    with pytest.raises(UserError, match="enqueue the tasks of each group in an order"):
        simulate(tasks)
    assert simulate(tasks, "priority").makespan == 2


def test_the_latency_of_a_stage_is_the_largest_sum_within_a_group():
    """HybridFlow, arXiv 2409.19256: reference and reward on one set, the critic on another."""
    assert stage_latency([[3, 4], [5]]) == 7 and stage_latency([[3], [4], [5]]) == 5 and stage_latency([]) == 0


@st.composite
def graphs(draw) -> list[SimulatedTask]:
    """Up to 12 tasks on 3 groups; each depends on earlier tasks only."""
    tasks = []
    for n in range(draw(st.integers(1, 12))):
        groups = tuple(draw(st.sets(st.sampled_from("xyz"), min_size=1)))
        after = tuple(f"t{i}" for i in sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)))) if n else ()
        tasks.append(SimulatedTask(f"t{n}", groups, draw(st.integers(0, 9)), after, draw(st.integers(0, 2))))
    return tasks


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from(["enqueued", "priority"]))
def test_properties_of_any_timeline(tasks, order):
    timeline = simulate(tasks, order)
    for task, interval in zip(tasks, timeline.intervals, strict=True):
        assert interval.end - interval.start == task.seconds
        assert all(timeline[name].end <= interval.start for name in task.after)
    for group, use in timeline.groups.items():
        on = sorted((i for i in timeline.intervals if group in i.groups), key=lambda i: (i.start, i.end))
        assert all(one.end <= other.start for one, other in zip(on, on[1:], strict=False))
        assert use.busy <= timeline.makespan and use.busy + use.idle == timeline.makespan
    seconds = {task.name: task.seconds for task in tasks}
    assert sum(seconds[name] for name in timeline.critical_path) == timeline.makespan >= timeline.depth
    assert timeline == simulate(tasks, order)
