"""The hosts of a machine and the numbers of their devices."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Protocol, TypeVar

from jaxalign.placement.slices import DeviceSlice


class Device(Protocol):
    """The attributes of a `jax.Device` that a machine is built from."""

    process_index: int
    device_kind: str


D = TypeVar("D", bound=Device)


@dataclasses.dataclass(frozen=True)
class Host:
    """Devices of one kind with the fastest connection between them.

    Attributes:
      kind: the kind of its devices, such as "TPU v5p".
      devices: the number of devices.
    """

    kind: str
    devices: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"a host has {self.devices} devices; at least 1 is expected")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices numbered from 0 in the order of their hosts.

    Attributes:
      hosts: the hosts.
      processes: the number of processes of the JAX world that runs on the machine. It may be 1 for several hosts: a plan for
        devices that are not present has no processes.
    """

    hosts: tuple[Host, ...]
    processes: int = 1

    def __post_init__(self) -> None:
        if not self.hosts or self.processes < 1:
            raise ValueError(f"a machine has {len(self.hosts)} hosts and {self.processes} processes; at least 1 is expected")

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The first device of each host, then the number of devices."""
        return tuple(itertools.accumulate((host.devices for host in self.hosts), initial=0))

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.starts[-1]

    @property
    def devices(self) -> DeviceSlice:
        """All devices."""
        return DeviceSlice(0, self.count)

    def host_of(self, device: int) -> int:
        """The index of the host of a device.

        Raises:
          IndexError: there is no such device.
        """
        if not 0 <= device < self.count:
            raise IndexError(f"device {device} does not exist; the last one is {self.count - 1}")
        return bisect.bisect_right(self.starts, device) - 1

    def spans(self, devices: DeviceSlice) -> range:
        """The indices of the hosts that a slice touches."""
        return range(self.host_of(devices.start), self.host_of(devices.stop - 1) + 1)

    def kinds(self, devices: DeviceSlice) -> tuple[str, ...]:
        """The distinct kinds of the devices of a slice, in order."""
        return tuple(dict.fromkeys(self.hosts[index].kind for index in self.spans(devices)))


def numbered(devices: Iterable[D]) -> list[D]:
    """The devices in the order of their numbers: by process, then in the given order."""
    return sorted(devices, key=lambda device: device.process_index)


def machine_of(devices: Iterable[Device]) -> Machine:
    """The machine of the devices of a run, such as `jax.devices()`.

    Consecutive devices of the same process and kind form a host. The position of a device in `numbered(devices)` is its number.
    """
    ordered = numbered(devices)
    groups = itertools.groupby(ordered, key=lambda device: (device.process_index, device.device_kind))
    hosts = tuple(Host(kind, len(list(members))) for (_, kind), members in groups)
    return Machine(hosts, len({device.process_index for device in ordered}))
