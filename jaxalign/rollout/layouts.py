"""The layout of a session's rows: how many rows, in rings of how many slots, and the steps from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST_SLOTS = 64
FEW = 4
"""Above this many small prefills, prompts are prefilled together in a large one."""
PREFILLED = 2048
"""The most prompt tokens, padding included, that one prefill has; a single longer prompt is prefilled by itself."""
SHARES = (1, 2, 4, 8)
"""All, a half, a quarter or an eighth of the slots decode."""
LONG = 2
"""Prompts per slot above which a queue is long: its end is a small part of it, so every other share suffices."""
LEAST_TIERED = 8, 256
"""The least rows of a part, and the least slots, for two tiers."""
SHORT = 5, 8
"""The share of a part's rows that are in the short tier."""
STRIDE = 32
"""Slots of large rings are a multiple of this, so that queues of similar length share programs."""


class Layout(NamedTuple):
    """One ring, or two tiers: a short ring, and a long one of twice its slots.

    rows: of a part, in each tier; slots: of each tier. A part's first rows are those of the first tier.
    """

    rows: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def size(self) -> int:
        """Rows of a part."""
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
    """The layout of `size` rows of a part in two tiers, the long one of `slots`; None if they are too few or too short."""
    least, fewest = LEAST_TIERED
    if size < least or slots < fewest or slots % 2:
        return None
    short = size * SHORT[0] // SHORT[1]
    return Layout((short, size - short), (slots // 2, slots))


def row_counts(rows: int, waves: float = 1) -> list[int]:
    """The numbers of rows of a part that may decode together, up to `rows`. waves: prompts in the queue for each slot."""
    return sorted({-(-rows // share) for share in SHARES[:: 1 if waves < LONG else 2]})


def slot_counts(most: int) -> list[int]:
    """The sizes of a ring that grows up to `most` slots or a few more; the last but one is not close to it."""
    most, counts = most + -most % (STRIDE if most > LEAST_SLOTS else 2), [LEAST_SLOTS]
    while counts[-1] < most:
        counts.append(2 * counts[-1])
    below = [count for count in counts[:-1] if 4 * count < 3 * most]
    return [*below, most]


def neighbours(layout: Layout, sizes: Sequence[int], counts: Sequence[int]) -> list[Layout]:
    """What a layout may become in one step; any becomes any other by few steps, so that few programs are needed. sizes,
    counts: of rows and of slots, ascending; only the most rows with the most slots come in two tiers."""
    size, slots = layout.size, layout.slots[-1]

    def tiered(size: int, slots: int) -> Layout | None:
        return in_tiers(size, slots) if (size, slots) == (sizes[-1], counts[-1]) else None

    found: list[Layout | None] = [other for other in (single(size, slots), tiered(size, slots)) if other != layout]
    larger = next((count for count in counts if count > slots), None)
    if larger is not None:
        found += [single(size, larger), tiered(size, larger)]
    at = sizes.index(size)
    if not layout.tiered:
        found += [single(other, slots) for other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2])]
    return [layout for layout in found if layout is not None]


def step_towards(target: Layout, layout: Layout, sizes: Sequence[int], counts: Sequence[int]) -> Layout:
    """The neighbour of a layout by which it comes to be `target`: more slots first, then the rows."""
    around = neighbours(layout, sizes, counts)
    slots, at, end = layout.slots[-1], sizes.index(layout.size), sizes.index(target.size)
    if slots < target.slots[-1]:
        wider = [other for other in around if other.slots[-1] > slots]
        return wider[-1] if target.tiered and at == end else wider[0]
    if at != end and not layout.tiered:
        return single(sizes[at + (1 if end > at else -1)], slots)
    return next(other for other in around if other.size == layout.size and other.slots[-1] == slots)


def prefill_sizes(length: int, parts: int, slots: int) -> tuple[int, int]:
    """How many prompts of this length each part of the rows, with so many slots, prefills at once: a few, or the most that
    there are. Powers of two."""
    most = min(PREFILLED // (length * parts), slots)
    most = 1 << max(0, most.bit_length() - 1)
    return max(1, most // 16), most


def prefill_groups(
    fresh: Sequence[Sequence[tuple[int, ...]]], padded: Callable[[int], int], most: int
) -> list[tuple[int, int, list[list[tuple[int, ...]]]]]:
    """Groups new prompts into prefills.

    Args:
      fresh: the different prompts that enter each part of the mesh.
      padded: the length that a prompt of a length is padded to.
      most: the most rows of a part.

    Returns:
      For each prefill: the padded length, the rows of a part, and the prompts of each part.
    """
    groups = []
    for length in sorted({padded(len(prompt)) for part in fresh for prompt in part}):
        left = [[prompt for prompt in part if padded(len(prompt)) == length] for part in fresh]
        few, many = prefill_sizes(length, len(fresh), most)
        while any(left):
            rows = few if max(map(len, left)) <= FEW * few else many
            groups.append((length, rows, [prompts[:rows] for prompts in left]))
            left = [prompts[rows:] for prompts in left]
    return groups
