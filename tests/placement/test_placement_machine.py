"""Machines: numbers of devices, their hosts and kinds, and machines read from the devices of a run."""

from __future__ import annotations

import types

import jax
import pytest

from jaxalign.placement.machine import Host, Machine, machine_of, numbered
from jaxalign.placement.slices import DeviceSlice

MIXED = Machine((Host("TPU v5p", 4), Host("TPU v5p", 4), Host("TPU v5e", 8)))


def device(process: int, kind: str = "TPU v4") -> types.SimpleNamespace:
    return types.SimpleNamespace(process_index=process, device_kind=kind)


def test_devices_are_numbered_in_the_order_of_hosts():
    assert MIXED.count == 16 and MIXED.devices == DeviceSlice(0, 16)
    assert [MIXED.host_of(number) for number in range(16)] == [0] * 4 + [1] * 4 + [2] * 8


@pytest.mark.parametrize("number", [-1, 16])
def test_a_device_that_does_not_exist_has_no_host(number):
    with pytest.raises(IndexError, match="does not exist; the last one is 15"):
        MIXED.host_of(number)


@pytest.mark.parametrize(("start", "count", "hosts", "kinds"), [
    (0, 4, [0], ("TPU v5p",)), (3, 2, [0, 1], ("TPU v5p",)), (0, 8, [0, 1], ("TPU v5p",)), (8, 8, [2], ("TPU v5e",)),
    (7, 2, [1, 2], ("TPU v5p", "TPU v5e")), (0, 16, [0, 1, 2], ("TPU v5p", "TPU v5e"))])
def test_the_hosts_and_kinds_of_a_slice(start, count, hosts, kinds):
    devices = DeviceSlice(start, count)
    assert list(MIXED.spans(devices)) == hosts and MIXED.kinds(devices) == kinds


def test_the_machine_of_devices_has_a_host_for_each_process_whatever_their_order():
    machine = machine_of([device(1), device(0), device(1), device(0), device(0)])
    assert machine == Machine((Host("TPU v4", 3), Host("TPU v4", 2)), processes=2)


def test_devices_of_unlike_kinds_in_one_process_are_two_hosts_and_one_process():
    machine = machine_of([device(0, "RTX 3090"), device(0, "RTX 3090"), device(0, "RTX 4090")])
    assert machine == Machine((Host("RTX 3090", 2), Host("RTX 4090", 1)), processes=1)


def test_the_position_in_numbered_is_the_number_of_a_device():
    devices = [device(1), device(0), device(1)]
    assert [id(one) for one in numbered(devices)] == [id(devices[1]), id(devices[0]), id(devices[2])]


def test_the_devices_of_this_run():
    machine = machine_of(jax.devices())
    assert machine == Machine((Host(jax.devices()[0].device_kind, jax.device_count()),), processes=1)


def test_empty_machines_and_hosts_are_refused():
    with pytest.raises(ValueError, match="0 devices"):
        Host("TPU v4", 0)
    with pytest.raises(ValueError, match="0 hosts"):
        Machine(())
