"""When programs ran on each group of devices: starts and ends from the order of the programs, and one row per iteration."""

from __future__ import annotations

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxalign.rl.program_times import ProgramTimes, device_groups
from jaxalign.tracking.device_times import FILE, busy_seconds, read_device_times

GROUPS = {"0": ("policy", "critic"), "1": ("reference", "reward", "generator")}


class Devices:
    """Programs whose results are ready at given times of a clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now, self._ready, self._waiter = 0.0, {}, threading.local()
        monkeypatch.setattr(jax, "block_until_ready", self._wait)

    def clock(self):
        return getattr(self._waiter, "now", self.now)

    def starts(self, times, name, role, at, ready, **options):
        self.now = at

        def start():
            result = jnp.zeros(())
            self._ready[id(result)] = ready, result
            return result

        return times.run(name, role, start, **options)

    def _wait(self, arrays):
        if arrays:
            self._waiter.now = max(self._ready[id(array)][0] for array in arrays)


def rows_of(monkeypatch, path, number=0):
    """Record the iteration of the placement `GROUPS` whose times the tests below work out."""
    devices = Devices(monkeypatch)
    times = ProgramTimes(path, GROUPS, devices.clock)
    with times.iteration(number):
        devices.starts(times, "reference", "reference", 1.0, 4.0)
        devices.starts(times, "values", "value", 1.0, 3.0)
        devices.starts(times, "reward", "reward", 1.5, 6.0)
        devices.starts(times, "advantages", "policy", 2.0, 7.0, needs=("reference", "reward", "values"))
        devices.now = 8.0
    return read_device_times(path)


def test_a_program_begins_after_its_start_the_one_before_it_and_those_that_it_needs(monkeypatch, tmp_path):
    row, = rows_of(monkeypatch, tmp_path / FILE)
    # The reward waits for the reference on device 1, and the advantages on device 0 for the reward.
    spans = {program.name: (program.groups, program.start, program.end) for program in row.programs}
    assert spans == {"reference": (("1",), 1, 4), "values": (("0",), 1, 3), "reward": (("1",), 4, 6),
                     "advantages": (("0",), 6, 7)}
    assert (row.iteration, row.first, row.seconds, row.groups) == (0, True, 8, GROUPS)
    assert busy_seconds([row, row], "0") == {"values": 4, "advantages": 2}
    assert busy_seconds([row], "1") == {"reference": 3, "reward": 2}


def test_a_program_on_several_groups_begins_when_all_of_them_are_free(monkeypatch, tmp_path):
    devices = Devices(monkeypatch)
    times = ProgramTimes(tmp_path / FILE, {"0": ("policy", "reference"), "1": ("policy", "reward")}, devices.clock)
    with times.iteration(0):
        devices.starts(times, "reference", "reference", 0.0, 2.0)
        devices.starts(times, "reward", "reward", 0.0, 5.0)
        devices.starts(times, "policy update", "policy", 1.0, 9.0)
    update = read_device_times(tmp_path / FILE)[0].programs[2]
    assert (update.groups, update.start, update.end) == (("0", "1"), 5, 9)


def test_a_resumed_run_has_each_iteration_once(tmp_path):
    path = tmp_path / FILE
    for first in (0, 2):  # The second start repeats iteration 2.
        times = ProgramTimes(path, GROUPS)
        for number in range(first, first + 3):
            with times.iteration(number):
                times.run("generate", "generator", lambda: None)
    assert [(row.iteration, row.first) for row in read_device_times(path)] == [
        (0, True), (1, False), (2, True), (3, False), (4, False)]
    with open(path, "a") as file:
        file.write('{"iteration": 5')  # A crash.
    with ProgramTimes(path, GROUPS).iteration(5):
        pass
    assert [row.iteration for row in read_device_times(path)] == [0, 1, 2, 3, 4, 5]


def test_an_iteration_that_fails_has_no_row_and_a_failed_program_does_not_stop_the_record(monkeypatch, tmp_path):
    times = ProgramTimes(tmp_path / FILE, GROUPS)
    with pytest.raises(KeyboardInterrupt), times.iteration(0):
        raise KeyboardInterrupt
    deleted = jnp.zeros(3)
    deleted.delete()
    with times.iteration(1):
        assert times.run("reward", "reward", lambda: deleted) is deleted
    assert [row.iteration for row in read_device_times(tmp_path / FILE)] == [1]


def test_nothing_is_recorded_on_the_host_between_iterations_or_without_a_file(tmp_path):
    times = ProgramTimes(tmp_path / FILE, {"0": ("policy",), "1": ("reference",)})
    assert times.run("generate", "policy", lambda: 3) == 3
    with times.iteration(0):
        assert times.run("reward", "reward", lambda: 4) == 4  # A reward on the host has no devices.
    assert read_device_times(tmp_path / FILE)[0].programs == ()
    with ProgramTimes(None, {}).iteration(0):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_group_is_a_largest_set_of_devices_with_the_same_roles():
    def on(*numbers):
        return types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array([jax.devices()[i] for i in numbers])))

    interleaved = {"policy": on(*range(8)), "reference": on(*range(4)), "reward": on(4, 5, 6, 7)}
    assert device_groups(interleaved) == {"0-3": ("policy", "reference"), "4-7": ("policy", "reward")}
    nested = {"policy": on(0, 1, 2, 3), "reference": on(1, 2), "generator": on(5)}
    assert device_groups(nested) == {"0, 3": ("policy",), "1-2": ("policy", "reference"), "5": ("generator",)}
