"""Packed answers: which sequence goes into which row of which part, made on the host, and what the device makes of it.

Prompts with their answers stand side by side in rows of one length, so that nothing is computed for padding but the ends of
rows; what both sequences of a pair begin with may stand there once. Rows are cut into parts of one shape; a program takes as
many of them as there are (`PackedParts.count`), so that fewer tokens cost less and nothing is compiled anew. What belongs to
answer tokens one by one stays [B, N].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.data.packing import fit
from jaxalign.errors import UserError
from jaxalign.models.attention.plain import STEM
from jaxalign.models.heads import response_positions
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import Sharding
from jaxalign.records import AnswerPairs, AnswerRows, PackedParts, PairBatch, Rollout, ScoredPairs
from jaxalign.training.microbatch import Parts

PARTS = 16  # A part has by itself this share of what the sequences could need, so that little is computed in vain.
LEAST_TOKENS = 768  # Of a part by itself, on a device: below, matrix products are slow.


def part_rows(sequences: int, T: int, tokens: int, ways: int = 1, unit: int = 1) -> tuple[int, int]:
    """(rows of a part, the most parts there can be) for so many sequences in rows of T tokens.

    tokens: most of one device's in a part; 0 chooses. ways, unit: see `rows_split`. Raises UserError where not one row fits.
    """
    least = T * unit // ways
    if 0 < tokens < least:
        raise UserError(f"micro_batch_tokens is {tokens}; a device needs room for {least}, in rows of {T} (two rows for pairs, "
                        "one for each part of a pipeline): raise it, or set it to 0, which chooses")
    most = tokens * ways // T if tokens else -(-max(LEAST_TOKENS * ways, sequences * T // PARTS) // T)
    most = max(unit, most // unit * unit)
    parts = -(-sequences // most)
    rows = -(-sequences // (parts * unit)) * unit
    return rows, -(-sequences // rows)


def rows_split(sharding: Sharding | None) -> tuple[int, int]:
    """(devices that share out a part's rows, what its rows are to be a multiple of)."""
    if sharding is None:
        return 1, 1
    return sharding.batch_size, sharding.batch_size * sharding.pipeline_micro_batches


def pack_answers(
    tokens: np.ndarray, prompts: np.ndarray, answers: np.ndarray, groups: Sequence[np.ndarray], counted, rows: int, most: int,
    ways: int = 1, together: int = 1, common: np.ndarray | None = None,
) -> PackedParts:  # fmt: skip
    """A plan of numpy arrays, one for each group of sequence numbers, which are equally many.

    tokens int [S, T]: prompts with their answers, of prompts and answers [S] tokens; packed rows are as long. counted bool [S]:
    sequences that are left out where it is not so. rows, most: see `part_rows`. ways: devices that share out a part's rows, and
    get about as many tokens each. Units of `together` neighbours in a group, which count or do not, stay in one part. common
    int [S], of neighbours by two: with how many tokens both begin that stand there once, as a stem (`attention_plain.STEM`);
    0: each has its own.
    """
    T, G, B = tokens.shape[1], len(groups), len(groups[0])
    common = np.zeros(len(tokens), np.int64) if common is None else common
    packed, segment_ids, positions, heads = (np.zeros((G, most, rows, T), np.int32) for _ in range(4))
    start, first, part = np.zeros((G, B), np.int32), np.zeros((G, B), np.int32), np.full((G, B), -1, np.int32)
    count, used = np.ones(G, np.int32), np.ones((G, most), np.int32)
    for g, group in enumerate(groups):
        inside = np.flatnonzero(np.asarray(counted)[group])
        if not len(inside):
            continue
        own = np.asarray(group)[inside]
        P, A, stem = (x[own].astype(np.int64) for x in (prompts, answers, common))
        follows = (stem > 0) & (np.arange(len(own)) % 2 == 1)  # The stem before it stands with its neighbour.
        skipped = np.where(follows, stem, 0)
        length = P + A - skipped
        offset, head, document, row = (np.zeros(len(own), np.int64) for _ in range(4))  # row: of all parts
        fitted = _fit(length, follows, T, rows, together)
        count[g] = len(fitted)
        for k, content in enumerate(fitted):
            fullest = sorted(content, key=lambda line: -sum(length[line]))
            for line, place in zip(fullest, _dealt(rows, ways), strict=False):
                offset[line], head[line] = np.cumsum(length[line]) - (length + skipped)[line], np.cumsum(A[line]) - A[line]
                document[line], row[line] = np.cumsum(~follows[line]), k * rows + place
        of, at = _ranges(length)
        at = at + skipped[of]
        place = (row * T + offset)[of] + at
        branch = np.where((stem > 0)[of] & (at >= stem[of]), 1 + follows[of], 0)
        packed[g].reshape(-1)[place], segment_ids[g].reshape(-1)[place] = tokens[own[of], at], document[of] + STEM * branch
        positions[g].reshape(-1)[place] = at
        of, at = _ranges(A)
        heads[g].reshape(-1)[(row * T + head)[of] + at] = (offset + P - 1)[of] + at
        part[g, inside] = row // rows
        np.maximum.at(used[g], row // rows, head + A)
        start[g, inside], first[g, inside] = row % rows * T + offset, row % rows * T + head
    return PackedParts(AnswerRows(packed, segment_ids, positions, heads, start, first, used), part, count)


def _fit(length: np.ndarray, follows: np.ndarray, T: int, rows: int, together: int) -> list[list[list[int]]]:
    """`fit`, where a sequence that follows its neighbour's stem stands right behind it."""
    whole = np.where(follows, 0, length + np.where(np.roll(follows, -1), np.roll(length, -1), 0))
    parts = fit(whole, T, rows, together)
    if not follows.any():
        return parts
    both = lambda i: (i, i + 1) if i + 1 < len(follows) and follows[i + 1] else (i,)  # noqa: E731
    return [[[j for i in line if not follows[i] for j in both(i)] for line in content] for content in parts]


def _dealt(rows: int, ways: int) -> list[int]:
    """Which row each of the rows, the fullest first, becomes: dealt out to the devices to and fro."""
    own = rows // ways
    turns = [range(ways) if turn % 2 == 0 else range(ways)[::-1] for turn in range(own)]
    return [way * own + turn for turn, order in enumerate(turns) for way in order]


def pack_groups(
    rollout: Rollout, groups: Sequence[np.ndarray], counted, tokens: int, sharding: Sharding | None
) -> PackedParts:
    """A plan, on the devices, of groups of a rollout (numpy), in parts of at most so many tokens of a device; 0 chooses."""
    rows = part_rows(len(groups[0]), rollout.tokens.shape[1], tokens, *rows_split(sharding))
    plan = pack_answers(
        rollout.tokens, rollout.prompt_length, rollout.response_length, groups, counted, *rows, rows_split(sharding)[0]
    )
    return place_parts(sharding, plan)


def pack_rollout(rollout: Rollout, tokens: int, sharding: Sharding | None) -> tuple[Rollout, PackedParts]:
    """A whole rollout on the devices, and all its responses packed as by `pack_groups`."""
    here = fetch(rollout)
    plan = pack_groups(here, [np.arange(len(here.tokens))], here.prompt_length > 0, tokens, sharding)
    return place_rows(sharding, here), jax.tree.map(lambda x: x[0], plan)


def pack_pairs(
    pairs: AnswerPairs | PairBatch, tokens: int, sharding: Sharding | None, whole: bool = False, branches: bool = False
) -> PackedParts:
    """The 2 B sequences of the pairs (numpy) that count, on the devices; both of a pair in one part. whole: all in one.
    branches: what both of a pair begin with stands there once, if both then fit into a row (`attention.reads_branches`)."""
    B, _, T = pairs.tokens.shape
    length, (ways, unit) = pairs.length.reshape(-1), rows_split(sharding)
    prompts = pairs.prompt_length.reshape(-1) if isinstance(pairs, AnswerPairs) else length
    rows = pair_rows(B, T, tokens, ways, unit, whole)
    plan = pack_answers(
        pairs.tokens.reshape(2 * B, T), prompts, length - prompts, [np.arange(2 * B)], np.repeat(pairs.weight > 0, 2), *rows,
        ways, 2, np.repeat(_common(pairs.tokens, pairs.length, prompts.reshape(B, 2)), 2) if branches else None,
    )  # fmt: skip
    return place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


def _common(tokens: np.ndarray, length: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """int [B]: with how many tokens both of each pair begin, of tokens [B, 2, T], without the one before the first answer token
    and the last one, which each has for itself; 0 where both do not fit into a row of T so."""
    T = tokens.shape[2]
    common = np.minimum(shared(tokens, length), prompts.min(axis=1) - 1)
    return np.where(length.sum(axis=1) - common <= T, np.maximum(common, 0), 0)


def shared(tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int [B]: with how many tokens both of each pair begin, of tokens [B, 2, T] and length [B, 2]."""
    equal = np.cumprod(tokens[:, 0] == tokens[:, 1], axis=1).sum(axis=1)
    return np.minimum(equal, length.min(axis=1))


def pair_rows(B: int, T: int, tokens: int, ways: int = 1, unit: int = 1, whole: bool = False) -> tuple[int, int]:
    """`part_rows` of B pairs, which never stand in two parts. whole: one part for all."""
    unit = math.lcm(unit, 2)
    return (-(-2 * B // unit) * unit, 1) if whole else part_rows(2 * B, T, tokens, ways, unit)


def _ranges(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(number of the range, place in it) of each element of ranges of these lengths, one after another."""
    of = np.repeat(np.arange(len(lengths)), lengths)
    return of, np.arange(len(of)) - (np.cumsum(lengths) - lengths)[of]


def place_parts(sharding: Sharding | None, parts: PackedParts) -> PackedParts:
    """A plan on the devices: its rows split over the mesh's batch axes, all else whole on each."""
    if sharding is None:
        return parts

    def placed(x: np.ndarray) -> jax.Array:
        split = x.ndim > parts.part.ndim  # [..., K, R, T], and not [..., B] or [...]
        axes = (None,) * (x.ndim - 2) + ("batch", None) if split else (None,) * x.ndim
        return jax.make_array_from_callback(x.shape, sharding.named(axes), lambda window: x[window])

    return jax.tree.map(placed, parts)


def alone(rollout: Rollout) -> AnswerRows:
    """Each sequence of a rollout in a row of its own, as it has them."""
    B, T = rollout.tokens.shape
    N, place = rollout.logprobs.shape[1], jnp.arange(B, dtype=jnp.int32)
    return AnswerRows(
        rollout.tokens, None, None, response_positions(rollout.prompt_length, N) - 1, place * T, place * N
    )


def pairs_alone(pairs: AnswerPairs | PairBatch | ScoredPairs) -> AnswerRows:
    """Each of the 2 B sequences of pairs in a row of its own. Where they are not answers, heads are no use."""
    B, _, T = pairs.tokens.shape
    prompts = (pairs.prompt_length if isinstance(pairs, AnswerPairs) else pairs.length).reshape(2 * B)
    place = jnp.arange(2 * B, dtype=jnp.int32) * T
    return AnswerRows(pairs.tokens.reshape(2 * B, T), None, None, response_positions(prompts, T) - 1, place, place)


def pair_parts(batch: AnswerPairs | PairBatch, packed: PackedParts | None) -> Parts:
    """The micro-batches of pairs, each (pairs, AnswerRows): all of them, of which those of the part count. packed None: all at
    once, each sequence in a row of its own."""
    if packed is None:
        return Parts(lambda _: (batch, pairs_alone(batch)), 1)

    def of(i):
        rows, inside = take_part(packed, i)
        return dataclasses.replace(batch, weight=jnp.where(inside[::2], batch.weight, 0.0)), rows

    return Parts(of, packed.count)


def take_part(parts: PackedParts, i) -> tuple[AnswerRows, jax.Array]:
    """(the rows of part i, bool [B]: which sequences are in it)."""
    rows = parts.rows
    own = (x[i] for x in (rows.tokens, rows.segment_ids, rows.positions, rows.heads))
    return AnswerRows(*own, rows.start, rows.first, rows.used[i]), parts.part == i


def of_answers(values, first, N: int) -> jax.Array:
    """[B, N]: the numbers of each sequence's answer tokens out of [R, M], the first of which is at `first` [B] of them all.

    Behind the end of an answer stands what follows it there: the caller masks by length.
    """
    place = first[:, None] + jnp.arange(N, dtype=jnp.int32)[None, :]
    return values.reshape(-1)[jnp.clip(place, 0, values.size - 1)]


def each_part(parts: PackedParts, fn):
    """The results of `fn(rows) -> pytree of [B, ...]` for every sequence, 0 where it is in no part; one part at a time."""

    def take(i, found):
        rows, inside = take_part(parts, i)
        keep = lambda new, old: jnp.where(inside.reshape(-1, *(1,) * (new.ndim - 1)), new, old)  # noqa: E731
        return jax.tree.map(keep, fn(rows), found)

    shapes = jax.eval_shape(lambda: fn(take_part(parts, 0)[0]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, parts.count, take, zeros)
