"""The layout of a session's rows: the number of rows, the rings' numbers of slots, and the steps between layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_SLOTS = 64
FEW = 4
"""Prompts that need more than this many small prefills use a large one."""
SMALLER = 16
"""A large prefill takes this many times the prompts of a small one."""
SMALL_ONLY = ("cpu",)
"""Platforms without large prefills. On a CPU, large prefills save about 7% of the time of prefilling, but each size needs its
own programs to prefill and to insert prompts, which take time and memory to compile (benchmarks/RESULTS.md)."""
PREFILLED = 2048
"""The maximum number of prompt tokens, including padding, in one prefill; a longer prompt is prefilled alone."""
SHARES = (1, 2, 4, 8)
"""All, 1/2, 1/4 or 1/8 of the rows decode."""
LONG = 2
"""A queue with at least this many prompts per row is long: its end is a small part of the work, so every second share
suffices."""
LEAST_ROWS = 4
"""A part decodes at least this many of its rows. Fewer would save little time, because each step reads all weights, and each
number of rows needs programs of its own."""
LEAST_TIERED = 8, 256
"""The minimum numbers of rows per part and of slots for two tiers."""
SHORT = 5, 8
"""The short tier's share of a part's rows, as a fraction."""
STRIDE = 32
"""Slots are a multiple of this, so that queues of similar length share programs."""


class Layout(NamedTuple):
    """One ring, or two tiers: a short ring, and a long one with twice the slots.

    rows: the rows of a part in each tier; slots: the slots of each tier. A part's first rows belong to the first tier.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of rows of a part."""
        return sum(self.rows)

    @property
    def tiered(self) -> bool:
        return len(self.rows) > 1

    def tier(self, row: int) -> tuple[int, int]:
        """(the tier of a row of a part, its index within the tier)."""
        return (0, row) if row < self.rows[0] else (1, row - self.rows[0])


def single(size: int, slots: int) -> Layout:
    return Layout((size,), (slots,))


def in_tiers(size: int, slots: int) -> Layout | None:
    """The two-tier layout with `size` rows per part and `slots` in the long tier; None if there are too few rows or slots."""
    least, fewest = LEAST_TIERED
    if size < least or slots < fewest or slots % 2:
        return None
    short = size * SHORT[0] // SHORT[1]
    return Layout((short, size - short), (slots // 2, slots))


def row_counts(rows: int, waves: float = 1) -> list[int]:
    """The possible numbers of rows of a part that decode together, up to `rows`. waves: queued prompts per row."""
    least = min(rows, LEAST_ROWS)
    return sorted({max(least, -(-rows // share)) for share in SHARES[:: 1 if waves < LONG else 2]})


def slot_counts(most: int, limit: int | None = None) -> list[int]:
    """The sizes of a growing ring, up to `most` slots (rounded up). The second-largest size is well below the largest.

    limit: the maximum length of a row, if known: rings have at most this number of slots, rounded up to an even one.
    """
    most, counts = max(LEAST_SLOTS, most + -most % STRIDE), [LEAST_SLOTS]
    most = most if limit is None else min(most, limit + limit % 2)
    while counts[-1] < most:
        counts.append(2 * counts[-1])
    below = [count for count in counts[:-1] if 4 * count < 3 * most]
    return [*below, most]


def neighbours(layout: Layout, sizes: Sequence[int], counts: Sequence[int]) -> list[Layout]:
    """The layouts that a layout may change to in one step. Every layout is reachable from every other in a few steps, so few
    programs are needed. sizes, counts: the numbers of rows and of slots, ascending; only the largest of both has two tiers."""
    size, slots = layout.size, layout.slots[-1]
    around: list[Layout | None] = []
    for count in [slots, *(count for count in counts if count > slots)][:2]:
        around.append(single(size, count))
        if (size, count) == (sizes[-1], counts[-1]):
            around.append(in_tiers(size, count))
    at = sizes.index(size)
    if not layout.tiered:
        around += [single(other, slots) for other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2])]
    return [other for other in around if other is not None and other != layout]


def step_towards(target: Layout, layout: Layout, sizes: Sequence[int], counts: Sequence[int]) -> Layout:
    """The next layout on the way to `target`: first more slots, then the rows."""
    around = neighbours(layout, sizes, counts)
    slots, at, end = layout.slots[-1], sizes.index(layout.size), sizes.index(target.size)
    if slots < target.slots[-1]:
        wider = [other for other in around if other.slots[-1] > slots]
        return wider[-1] if target.tiered and at == end else wider[0]
    if at != end and not layout.tiered:
        return single(sizes[at + (1 if end > at else -1)], slots)
    return next(other for other in around if other.size == layout.size and other.slots[-1] == slots)


def prefill_sizes(length: int, parts: int, slots: int, platform: str) -> tuple[int, int]:
    """(small, large): the numbers of prompts of this length that a part of the rows prefills together, powers of two. slots:
    the rows of a part. platform: "cpu", "gpu" or "tpu"; both numbers are equal on those of `SMALL_ONLY`."""
    most = min(PREFILLED // (length * parts), slots)
    most = 1 << max(0, most.bit_length() - 1)
    small = max(1, most // SMALLER)
    return small, small if platform in SMALL_ONLY else most


def prefill_groups(
    fresh: Sequence[Sequence[tuple[int, ...]]], padded: Callable[[int], int], most: int, platform: str
) -> list[tuple[int, int, list[list[tuple[int, ...]]]]]:
    """Groups new prompts into prefills.

    Args:
      fresh: the distinct prompts that enter each part of the mesh.
      padded: maps a prompt's length to its padded length.
      most: the maximum number of rows of a part.
      platform: see `prefill_sizes`.

    Returns:
      For each prefill: the padded length, the rows per part, and the prompts of each part.
    """
    groups = []
    for length in sorted({padded(len(prompt)) for part in fresh for prompt in part}):
        left = [[prompt for prompt in part if padded(len(prompt)) == length] for part in fresh]
        few, many = prefill_sizes(length, len(fresh), most, platform)
        while any(left):
            rows = few if max(map(len, left)) <= FEW * few else many
            groups.append((length, rows, [prompts[:rows] for prompts in left]))
            left = [prompts[rows:] for prompts in left]
    return groups
