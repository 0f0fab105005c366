"""The time of an iteration with roles on devices of their own, by hand from the order of programs in docs/placement.md."""

from __future__ import annotations

import pytest

from jaxalign.planner.placed_tasks import Durations, seconds_of_iteration

# Seconds: sampling 10, reference 3, reward 4, values 2, updates of both roles in one program 7.
SCORES = (("reference", "score", 3.0), ("reward", "reward", 4.0))


def times(sampler="policy", valuer="critic", **groups) -> dict:
    tasks = ((sampler, "generate", 10.0), *SCORES, (valuer, "score", 2.0), ("policy", "update", 7.0))
    return {"tasks": tasks, "moves": {}, "groups": {role: tuple(own) for role, own in groups.items()}}


def test_on_common_devices_all_tasks_take_turns():
    given = times(policy="A", critic="A", reference="A", reward="A")
    assert seconds_of_iteration(Durations(**given)) == 10 + 3 + 4 + 2 + 7


def test_interleave_scores_on_both_halves_at_the_same_time():
    given = times(policy="AB", critic="AB", reference="A", reward="B")
    assert seconds_of_iteration(Durations(**given)) == 10 + max(3, 4) + 2 + 7


def test_one_side_waits_for_the_other_with_separate():
    given = times("generator", "value", policy="A", critic="A", generator="B", value="B", reference="B", reward="B")
    given["moves"] = {"generator": 0.5, "value": 0.25}
    assert seconds_of_iteration(Durations(**given)) == 0.5 + 10 + 3 + 4 + 0.25 + 2 + 7


def test_updates_on_different_devices_run_at_the_same_time():
    given = times(policy="A", critic="B", reference="B", reward="A")
    given["tasks"] = (*given["tasks"], ("critic", "update", 9.0))
    # After sampling: A has the reward (4), B the reference (3) and the values (2); then the updates (7 and 9).
    assert seconds_of_iteration(Durations(**given)) == 10 + max(4, 3 + 2) + max(7, 9)


@pytest.mark.parametrize(("groups", "seconds"), [
    # The generator's devices have no other role: sampling runs during scoring (3 + 4 + 2) and the update.
    ({"policy": "A", "critic": "A", "generator": "C", "reference": "A", "reward": "A"}, max(10, 9 + 7)),
    # They also score: sampling runs during the update only.
    ({"policy": "A", "critic": "A", "generator": "B", "value": "B", "reference": "B", "reward": "B"}, 9 + max(10, 7)),
    # The policy samples: nothing overlaps.
    ({"policy": "A", "critic": "A", "reference": "A", "reward": "A"}, 10 + 9 + 7),
    # The generator is on devices of the policy: in turn.
    ({"policy": "A", "critic": "A", "generator": "A", "reference": "A", "reward": "A"}, 10 + 9 + 7),
])
def test_sampling_one_step_ahead_overlaps_as_documented(groups, seconds):
    given = times("generator" if "generator" in groups else "policy", "value" if "value" in groups else "critic", **groups)
    assert seconds_of_iteration(Durations(**given, ahead=True)) == pytest.approx(seconds)
