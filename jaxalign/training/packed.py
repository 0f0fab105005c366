"""Packed answers: which sequence goes into which row of which part, made on the host, and what the device makes of it.

Prompts with their answers stand side by side in rows of one length, so that nothing is computed for padding but the ends of
rows. Rows are cut into parts of one shape; a program takes as many of them as there are (`PackedParts.count`), so that fewer
tokens cost less and nothing is compiled anew. What belongs to answer tokens one by one stays [B, N].
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.data.packing import best_fit
from jaxalign.errors import UserError
from jaxalign.models.heads import response_positions
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import Sharding
from jaxalign.records import AnswerRows, PackedParts, Rollout

PARTS = 8  # A part has by itself this share of what the sequences could need, so that little is computed in vain.
LEAST_TOKENS = 512  # Of a part by itself, on a device: below, matrix products are slow.


def part_rows(sequences: int, T: int, tokens: int, ways: int = 1, unit: int = 1) -> tuple[int, int]:
    """(rows of a part, the most parts there can be) for so many sequences in rows of T tokens.

    tokens: most of one device's in a part; 0 chooses. ways, unit: see `rows_split`. Raises UserError where not one row fits.
    """
    least = T * unit // ways
    if 0 < tokens < least:
        raise UserError(f"config.ppo.micro_batch_tokens is {tokens}; a device needs room for {least}, a row of {T} for each "
                        "part of its pipeline: raise it, or set it to 0, which chooses")
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


def pack_answers(rollout: Rollout, groups: Sequence[np.ndarray], counted, rows: int, most: int) -> PackedParts:
    """A plan of numpy arrays, one for each group of row numbers of the rollout (numpy arrays, as all groups equally long).

    Rows are as long as the rollout's. counted bool [B]: rows that are left out where it is not so. rows, most: see `part_rows`.
    """
    T = rollout.tokens.shape[1]
    G, B = len(groups), len(groups[0])
    tokens, segment_ids, positions, heads = (np.zeros((G, most, rows, T), np.int32) for _ in range(4))
    start, first, part = np.zeros((G, B), np.int32), np.zeros((G, B), np.int32), np.full((G, B), -1, np.int32)
    count, used = np.ones(G, np.int32), np.ones((G, most), np.int32)
    prompts, answers = np.asarray(rollout.prompt_length), np.asarray(rollout.response_length)
    for g, group in enumerate(groups):
        inside = np.flatnonzero(np.asarray(counted)[group])
        if not len(inside):
            continue
        own = group[inside]
        P, A = prompts[own].astype(np.int64), answers[own].astype(np.int64)
        fitted = best_fit((P + A).tolist(), T)
        fitted.sort(key=lambda row: -sum(P[i] + A[i] for i in row))
        count[g] = -(-len(fitted) // rows)
        # Full rows come first and are dealt out in turn, so that every part and every device has its share of them.
        order = np.concatenate([np.asarray(row) for row in fitted])
        where = np.repeat([i % count[g] * rows + i // count[g] for i in range(len(fitted))], [len(row) for row in fitted])
        offset, head = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        segment, row = np.zeros(len(own), np.int64), np.zeros(len(own), np.int64)
        row[order] = where
        for line in fitted:
            offset[line], head[line] = np.cumsum((P + A)[line]) - (P + A)[line], np.cumsum(A[line]) - A[line]
            segment[line] = np.arange(1, len(line) + 1)
        of, at = _ranges(P + A)
        place = (row * T + offset)[of] + at
        tokens[g].reshape(-1)[place] = rollout.tokens[own[of], at]
        segment_ids[g].reshape(-1)[place], positions[g].reshape(-1)[place] = segment[of], at
        of, at = _ranges(A)
        heads[g].reshape(-1)[(row * T + head)[of] + at] = (offset + P - 1)[of] + at
        part[g, inside] = row // rows
        np.maximum.at(used[g], row // rows, head + A)
        start[g, inside], first[g, inside] = row % rows * T + offset, row % rows * T + head
    return PackedParts(AnswerRows(tokens, segment_ids, positions, heads, start, first, used), part, count)


def pack_rollout(rollout: Rollout, tokens: int, sharding: Sharding | None) -> tuple[Rollout, PackedParts]:
    """A whole rollout on the devices, and all its responses in parts of at most so many tokens of a device; 0 chooses."""
    here = fetch(rollout)
    B, T = here.tokens.shape
    plan = pack_answers(here, [np.arange(B)], here.prompt_length > 0, *part_rows(B, T, tokens, *rows_split(sharding)))
    return place_rows(sharding, here), place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


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
    """Each sequence in a row of its own, as the rollout has them."""
    B, T = rollout.tokens.shape
    N, place = rollout.logprobs.shape[1], jnp.arange(B, dtype=jnp.int32)
    return AnswerRows(
        rollout.tokens, None, None, response_positions(rollout.prompt_length, N) - 1, place * T, place * N
    )


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
