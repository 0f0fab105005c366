"""Slices of devices, and shares of roles resolved to slices."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.placement.slices import DeviceSlice, allocate

SLICES = st.builds(DeviceSlice, st.integers(0, 12), st.integers(1, 8))


def allocated(shares: list[float], total: int) -> list[str]:
    return [str(devices) for devices in allocate({f"role{i}": share for i, share in enumerate(shares)}, total).values()]


@given(SLICES, SLICES)
def test_relations_are_those_of_sets_of_devices(a, b):
    left, right = set(range(a.start, a.stop)), set(range(b.start, b.stop))
    assert a.overlaps(b) == bool(left & right) and a.disjoint(b) == (not left & right) and a.covers(b) == (left >= right)
    part = a.without(b)
    if part is None:
        assert left <= right
    else:
        # The longest run of consecutive devices that only the first slice has.
        runs = [x for x in (sorted(left - right)[: len([d for d in left - right if d < b.start])],
                            [d for d in left - right if d >= b.stop]) if x]
        assert set(range(part.start, part.stop)) <= left - right and part.count == max(map(len, runs))


def test_the_text_of_a_slice():
    assert [str(DeviceSlice(0, 4)), str(DeviceSlice(5, 1))] == ["0-3", "5"]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 0)])
def test_empty_slices_do_not_exist(start, count):
    with pytest.raises(ValueError, match="not possible"):
        DeviceSlice(start, count)


@pytest.mark.parametrize(("shares", "total", "slices"), [
    # The first three are the worked examples of arXiv 2312.11819 for actor, critic, reference and reward.
    ([1, 1, 0.5, 0.5], 8, ["0-7", "0-7", "0-3", "4-7"]),
    ([0.25] * 4, 8, ["0-1", "2-3", "4-5", "6-7"]),
    ([0.5, 0.5, 1, 1], 8, ["0-3", "4-7", "0-7", "0-7"]),
    ([0.5] * 4, 8, ["0-3", "4-7", "0-3", "4-7"]),
    ([1, 0.5, 0.3, 0.2], 10, ["0-9", "0-4", "5-7", "8-9"]),
    ([1 / 3, 1 / 3, 1 / 3], 3, ["0", "1", "2"]),
    ([0.5, 1, 0.5], 2, ["0", "0-1", "1"]),
    ([1], 1, ["0"]),
])
def test_shares(shares, total, slices):
    assert allocated(shares, total) == slices


@pytest.mark.parametrize(("shares", "total", "message"), [
    ([1, 0.5, 0.3, 0.2], 8, "the shares of role1 (0.5) and role2 (0.3) and role3 (0.2) are not whole numbers of devices; the "
                            "nearest that work on 8 devices are 4/8, 2/8, 2/8"),
    ([0.5, 0.25], 8, "the shares of role0 (0.5) and role1 (0.25) sum to 0.75 instead of 1; the nearest that work on 8 devices "
                     "are 5/8, 3/8"),
    ([0.75, 0.75], 8, "the shares of role0 (0.75) and role1 (0.75) sum to 1.5 instead of 1; the nearest that work on 8 devices "
                      "are 4/8, 4/8"),
    ([1, 0.5], 4, "the shares of role1 (0.5) sum to 0.5 instead of 1; the nearest that work on 4 devices are 4/4"),
    ([0.333, 0.333, 0.333], 3, "the shares of role0 (0.333) and role1 (0.333) and role2 (0.333) sum to 0.999 instead of 1; the "
                               "nearest that work on 3 devices are 1/3, 1/3, 1/3"),
    ([0.5, 0.5], 1, "role0 (0.5) and role1 (0.5) are 2 roles on exclusive devices, but there is 1 device; give some of them "
                    "share 1, which is all devices"),
    ([0.0, 1], 8, "the share of role0 is 0; it must be above 0 and at most 1, which is all devices"),
    ([1.5], 8, "the share of role0 is 1.5; it must be above 0 and at most 1, which is all devices"),
    ([float("nan")], 8, "the share of role0 is nan; it must be above 0 and at most 1, which is all devices"),
])
def test_refused_shares(shares, total, message):
    with pytest.raises(UserError) as error:
        allocated(shares, total)
    assert str(error.value) == message


@given(st.lists(st.one_of(st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0]), st.floats(1e-3, 1)), min_size=1, max_size=8),
       st.integers(1, 64))
def test_exclusive_groups_are_in_order_disjoint_and_cover_all_devices_or_the_nearest_shares_do(shares, total):
    try:
        placed = allocate({f"role{i}": share for i, share in enumerate(shares)}, total)
    except UserError as error:
        near = re.search(r"are ([\d/, ]+)$", str(error))
        if near is None:
            assert "roles on exclusive devices" in str(error)
            return
        fractions = [tuple(map(int, part.split("/"))) for part in near[1].split(", ")]
        shares = [a / b for a, b in fractions]
        placed = allocate({f"role{i}": share for i, share in enumerate(shares)}, total)
    stop = 0
    for share, devices in zip(shares, placed.values(), strict=True):
        if share == 1:
            assert devices == DeviceSlice(0, total)
        else:
            assert devices.start == stop % total and devices.count == pytest.approx(share * total, abs=1e-3)
            stop = devices.stop
    assert stop in (0, total)
