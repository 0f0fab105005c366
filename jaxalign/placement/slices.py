"""Contiguous slices of devices, and their allocation to roles by shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxalign.errors import UserError

_ROUNDING = 1e-6
"""The largest error of a number of devices that is computed from a share, so that 1/3 of 3 devices is one device."""


@dataclasses.dataclass(frozen=True)
class DeviceSlice:
    """Devices [start, start + count). Its text is that of a placement entry: "0-3", or "5" for one device."""

    start: int
    count: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 1:
            raise ValueError(f"a slice of {self.count} devices from {self.start} is not possible")

    @property
    def stop(self) -> int:
        """The number after that of the last device."""
        return self.start + self.count

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}" if self.count > 1 else str(self.start)

    def overlaps(self, other: DeviceSlice) -> bool:
        """Whether a device is in both slices."""
        return self.start < other.stop and other.start < self.stop

    def disjoint(self, other: DeviceSlice) -> bool:
        """Whether no device is in both slices."""
        return not self.overlaps(other)

    def covers(self, other: DeviceSlice) -> bool:
        """Whether every device of the other slice is in this one."""
        return self.start <= other.start and other.stop <= self.stop

    def without(self, other: DeviceSlice) -> DeviceSlice | None:
        """The longest contiguous part with no device of the other slice; None if there is no device left."""
        if self.disjoint(other):
            return self
        before, after = other.start - self.start, self.stop - other.stop
        if max(before, after) < 1:
            return None
        return DeviceSlice(self.start, before) if before >= after else DeviceSlice(other.stop, after)


def allocate(shares: Mapping[str, float], total: int) -> dict[str, DeviceSlice]:
    """Places roles on devices by their shares of the devices, as the slots of arXiv 2312.11819.

    A role with share 1 gets all devices. Roles with smaller shares form exclusive groups: in the given order they are placed
    one after another, and a group ends when its shares sum to 1. The next role then starts a new group at device 0. Several
    groups are allowed, because the order of the roles determines them: four shares of 0.5 are two groups of two halves. Roles
    of different groups that share devices take turns. Within a group the slices are disjoint, in order, and cover all devices.

    Args:
      shares: the share of each role, in (0, 1].
      total: the number of devices.

    Raises:
      UserError: a share is not in (0, 1], a group has more roles than devices, its shares do not sum to 1, or a share is not a
        whole number of devices.
    """
    for role, share in shares.items():
        if not 0 < share <= 1:
            raise UserError(f"the share of {role} is {share:g}; it must be above 0 and at most 1, which is all devices")
    slices = {role: DeviceSlice(0, total) for role, share in shares.items() if share == 1}
    for group in _groups(shares):
        start = 0
        for role, count in zip(group, _counts(group, total), strict=True):
            slices[role] = DeviceSlice(start, count)
            start += count
    return {role: slices[role] for role in shares}


def _groups(shares: Mapping[str, float]) -> list[dict[str, float]]:
    """The exclusive groups; shares of a group may sum to more than 1, and those of the last one to less."""
    groups: list[dict[str, float]] = []
    filled = 1.0
    for role, share in shares.items():
        if share < 1:
            if filled > 1 - _ROUNDING:
                groups.append({})
                filled = 0.0
            groups[-1][role] = share
            filled += share
    return groups


def _counts(group: Mapping[str, float], total: int) -> list[int]:
    """The number of devices of each role of an exclusive group. Raises UserError as `allocate` does."""
    names = " and ".join(f"{role} ({share:g})" for role, share in group.items())
    if len(group) > total:
        present = "is 1 device" if total == 1 else f"are {total} devices"
        raise UserError(f"{names} are {len(group)} roles on exclusive devices, but there {present}; give some of them "
                        "share 1, which is all devices")
    exact = [share * total for share in group.values()]
    counts = [round(count) for count in exact]
    if sum(counts) == total and all(count and abs(count - near) <= _ROUNDING * total for count, near in
                                    zip(counts, exact, strict=True)):
        return counts
    near = ", ".join(f"{count}/{total}" for count in _nearest_counts(list(group.values()), total))
    whole = sum(group.values())
    wrong = f"sum to {whole:g} instead of 1" if abs(whole - 1) > _ROUNDING else "are not whole numbers of devices"
    raise UserError(f"the shares of {names} {wrong}; the nearest that work on {total} devices are {near}")


def _nearest_counts(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers, at least 1, that sum to `total` and are proportional to the shares but for rounding."""
    exact = [share / sum(shares) * total for share in shares]
    counts = [max(1, int(count)) for count in exact]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        # Change the count that is furthest from its share in this direction, and keep each at 1 or more.
        able = [i for i, count in enumerate(counts) if count + step >= 1]
        counts[max(able, key=lambda i: step * (exact[i] - counts[i]))] += step
    return counts
