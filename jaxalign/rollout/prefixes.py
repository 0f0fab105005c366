"""Groups texts that begin with the same tokens, so that a model computes each common beginning once (docs/rollout.md).

These decisions depend only on the texts and on sizes, so every process makes the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxalign.rollout.layouts import FEW, prefill_sizes

LEAST = 32
"""The minimum number of tokens that the texts of a group share."""
MOST = 8
"""The maximum number of prompts that are prefilled with one prefix."""
WORTHWHILE = 0.75
"""Prefixes are shared if the padded tokens to compute are at most this share of those without sharing."""


class PrefixGroup(NamedTuple):
    """Texts with a common prefix: their indices, and the number of tokens of the prefix, less than those of every text."""

    rows: tuple[int, ...]
    shared: int


class SharedBatch(NamedTuple):
    """Texts to compute together, G prefixes with R texts each.

    prefixes int32 [G, P] with counts int32 [G] tokens; tokens int32 [G * R, T], the rest of each text, with lengths int32
    [G * R]; rows int32 [G * R], the index of each text, or -1 where there is none. Unused places have a length of 1.
    """

    prefixes: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


class Related(NamedTuple):
    """Different prompts with a common prefix of `shared` tokens."""

    prompts: tuple[tuple[int, ...], ...]
    shared: int


def related(prompts: Sequence[tuple[int, ...]]) -> list[Related]:
    """Groups of 2 to `MOST` of these different prompts that share a prefix; other prompts are in no group."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i])
    common = [_common(prompts[a], prompts[b]) for a, b in itertools.pairwise(order)]
    groups = [group for group in best_groups(prompts, order, common, MOST) if len(group.rows) > 1]
    return [Related(tuple(prompts[row] for row in group.rows), group.shared) for group in groups]


class SharedPrefill(NamedTuple):
    """Groups to prefill together: the padded lengths of their prefixes and of the rest of their prompts, the number of groups
    and of prompts in a group for each part of the mesh, and the groups of each part."""

    prefix: int
    rest: int
    count: int
    each: int
    groups: list[list[Related]]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int32 prefixes [G, P], their numbers of tokens [G], and the rest of the prompts [G * each, T]. G is `count` times the
        number of parts. Like other prompts in a prefill, prompts are padded with their own last token."""
        P, T, count, each, parts = *self[:4], len(self.groups)
        prefixes, counts = np.zeros((parts, count, P), np.int32), np.zeros((parts, count), np.int32)
        rest = np.zeros((parts, count, each, T), np.int32)
        for part, own in enumerate(self.groups):
            for g, (prompts, shared) in enumerate(own):
                prefixes[part, g, :shared], counts[part, g] = prompts[0][:shared], shared
                for r, prompt in enumerate(prompts):
                    rest[part, g, r] = prompt[-1]
                    rest[part, g, r, : len(prompt) - shared] = prompt[shared:]
        return prefixes.reshape(-1, P), counts.reshape(-1), rest.reshape(-1, T)

    def sources(self) -> list[list[tuple[tuple[int, ...], int, int]]]:
        """For each part, its prompts: (prompt, its index in `arrays`, the number of its tokens that belong to another prompt).
        The first prompt of a group owns the prefix."""
        return [
            [
                (prompt, g * self.each + r, shared if r else 0)
                for g, (prompts, shared) in enumerate(groups) for r, prompt in enumerate(prompts)
            ]
            for groups in self.groups
        ]


def shared_prefills(groups: Sequence[Sequence[Related]], bucket: int, most: int, platform: str) -> list[SharedPrefill]:
    """The prefills of groups of prompts.

    Args:
      groups: the groups of each part of the mesh.
      bucket: see `padded_length`.
      most: the maximum number of rows of a part.
      platform: see `prefill_sizes`.
    """
    def shape(group: Related) -> tuple[int, int, int]:
        rest, each = max(map(len, group.prompts)) - group.shared, 1 << (len(group.prompts) - 1).bit_length()
        return padded_length(group.shared, bucket), padded_length(rest, bucket), each

    prefills = []
    for prefix, rest, each in sorted({shape(group) for part in groups for group in part}):
        left = [[group for group in part if shape(group) == (prefix, rest, each)] for part in groups]
        few, many = prefill_sizes(prefix + each * rest, len(groups), max(1, most // each), platform)
        while any(left):
            count = few if max(map(len, left)) <= FEW * few else many
            prefills.append(SharedPrefill(prefix, rest, count, each, [part[:count] for part in left]))
            left = [part[count:] for part in left]
    return prefills


def plan_batches(
    texts: Sequence[Sequence[int]], batch: int, parts: int, bucket: int, unshared: int
) -> list[SharedBatch] | None:
    """The batches in which to compute texts with shared prefixes.

    Args:
      texts: token ids, at least one for each text.
      batch: the maximum number of texts to compute together.
      parts: the number of parts into which the mesh splits them.
      bucket: prefixes are padded to a multiple of this length, and the rest of texts to a multiple of half of it.
      unshared: the number of tokens to compute without sharing, including padding.

    Returns:
      The batches; None if sharing is not worthwhile.
    """
    order = sorted(range(len(texts)), key=lambda i: (tuple(texts[i]), i))
    common = [_common(texts[a], texts[b]) for a, b in itertools.pairwise(order)]
    best, most, R = WORTHWHILE * unshared, None, 2
    while R <= min(batch // parts, 2 * len(texts)):
        G, groups = batch // R // parts * parts, best_groups(texts, order, common, R)
        chunks = _chunks(texts, groups, G, bucket)
        cost = sum(G * P + G * R * T for _, P, T in chunks)
        if cost <= best and len(groups) < len(texts):
            best, most = cost, (G, R, chunks)
        R *= 2
    if most is None:
        return None
    G, R, chunks = most
    return [_filled(texts, groups, (G, R, P, T)) for groups, P, T in chunks]


def best_groups(texts: Sequence[Sequence[int]], order: Sequence[int], common: Sequence[int], most: int) -> list[PrefixGroup]:
    """Groups of at most `most` texts that save the most tokens. A group shares at least `LEAST` tokens and half of its longest
    text. A text that shares nothing is a group of its own, of which all tokens but the last are the prefix.

    Args:
      texts: token ids.
      order: the indices of the texts in lexicographic order, in which texts with a long common prefix are adjacent.
      common: the number of tokens that each text of `order` shares with the next one.
      most: the maximum size of a group.
    """
    saved, sizes = [0], [0]  # For the first n texts of `order`: the saved tokens, and the size of the last group.
    for n in range(1, len(order) + 1):
        shortest = longest = shared = len(texts[order[n - 1]])
        saved.append(saved[n - 1])
        sizes.append(1)
        for size in range(2, min(most, n) + 1):
            length = len(texts[order[n - size]])
            shortest, longest, shared = min(shortest, length), max(longest, length), min(shared, common[n - size])
            prefix = min(shared, shortest - 1)
            if prefix < LEAST or 2 * prefix < longest:
                break  # A larger group shares no more, and its longest text is no shorter.
            if saved[n - size] + (size - 1) * prefix > saved[n]:
                saved[n], sizes[n] = saved[n - size] + (size - 1) * prefix, size
    groups, n = [], len(order)
    while n:
        rows = tuple(order[n - sizes[n] : n])
        shared = min([len(texts[row]) - 1 for row in rows] + list(common[n - sizes[n] : n - 1]))
        groups.append(PrefixGroup(rows, shared))
        n -= sizes[n]
    return groups[::-1]


def padded_length(length: int, bucket: int) -> int:
    """The length to which texts are padded, so that few shapes are compiled: a multiple of `bucket`, and beyond eight of them
    of 2, 4, 8... `bucket`, so that the padding stays below a quarter."""
    step = bucket
    while length > 8 * step:
        step *= 2
    return -(-length // step) * step


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of two texts."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:size]) != np.asarray(b[:size]))
    return int(differ[0]) if len(differ) else size


def _chunks(
    texts: Sequence[Sequence[int]], groups: Sequence[PrefixGroup], G: int, bucket: int
) -> list[tuple[Sequence[PrefixGroup], int, int]]:
    """Groups to compute together, at most G, with the padded lengths of their prefixes and of the rest of their texts."""
    rest = [max(len(texts[row]) for row in group.rows) - group.shared for group in groups]
    sizes = [
        (padded_length(length, max(1, bucket // 2)), padded_length(max(1, group.shared), bucket))
        for length, group in zip(rest, groups, strict=True)
    ]
    order = sorted(range(len(groups)), key=lambda i: (sizes[i], i))
    chunks = [order[i : i + G] for i in range(0, len(order), G)]
    return [([groups[i] for i in chunk], max(sizes[i][1] for i in chunk), max(sizes[i][0] for i in chunk)) for chunk in chunks]


def _filled(
    texts: Sequence[Sequence[int]], groups: Sequence[PrefixGroup], shape: tuple[int, int, int, int]
) -> SharedBatch:
    G, R, P, T = shape
    prefixes, counts = np.zeros((G, P), np.int32), np.zeros(G, np.int32)
    tokens, lengths, places = np.zeros((G, R, T), np.int32), np.ones((G, R), np.int32), np.full((G, R), -1, np.int32)
    for g, (rows, shared) in enumerate(groups):
        prefixes[g, :shared], counts[g] = texts[rows[0]][:shared], shared
        for r, row in enumerate(rows):
            rest = texts[row][shared:]
            tokens[g, r, : len(rest)], lengths[g, r], places[g, r] = rest, len(rest), row
    return SharedBatch(prefixes, counts, tokens.reshape(G * R, T), lengths.ravel(), places.ravel())
