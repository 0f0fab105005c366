"""Packs answered prompts into micro-batches: the host plans the packing, and programs on devices use the plan.

Prompts with their answers are concatenated in rows of equal length, so that only the ends of rows are padding; a prefix that
both sequences of a pair share may be stored once. Rows are grouped into parts of the same shape. A program loops over the parts
in use (`PackedParts.count`), so fewer tokens cost less time without another compilation. Arrays over answer tokens keep the
shape [B, N].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.config.sections.shared import AUTO
from jaxalign.data.packing import fit
from jaxalign.errors import UserError
from jaxalign.models.attention.plain import STEM
from jaxalign.models.heads import response_positions
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import Sharding
from jaxalign.parallel.traced import traced
from jaxalign.records import AnswerPairs, AnswerRows, Experience, PackedParts, PairBatch, Rollout, ScoredPairs
from jaxalign.steps.microbatch import Parts

PARTS = 16  # By default, a part has 1/PARTS of the tokens that the sequences need at most, so that little of it is padding.
LEAST_TOKENS = 768  # By default, a part has at least this many tokens per device, since smaller matrix products are slow.


def part_rows(sequences: int, T: int, tokens: int, ways: int = 1, unit: int = 1) -> tuple[int, int]:
    """(rows per part, the largest number of parts) for `sequences` sequences in rows of T tokens.

    Args:
      tokens: the maximum number of tokens per device in a part; 0 chooses automatically.
      ways: see `rows_split`.
      unit: see `rows_split`.

    Raises:
      UserError: `tokens` is too small for one row.
    """
    least = T * unit // ways
    if tokens == AUTO:
        raise UserError("micro_batch_tokens is 'auto', which a run of stages or a plan replaces; give a number here")
    if 0 < tokens < least:
        raise UserError(f"micro_batch_tokens is {tokens}; at least {least} are needed for rows of {T} (two rows for pairs, one "
                        "for each micro-batch of a pipeline): raise it, or set it to 0 to choose it automatically")
    most = tokens * ways // T if tokens else -(-max(LEAST_TOKENS * ways, sequences * T // PARTS) // T)
    most = max(unit, most // unit * unit)
    parts = -(-sequences // most)
    rows = -(-sequences // (parts * unit)) * unit
    return rows, -(-sequences // rows)


def rows_split(sharding: Sharding) -> tuple[int, int]:
    """(the number of devices that share a part's rows, a number that must divide the part's row count)."""
    return sharding.batch_size, sharding.batch_size * sharding.pipeline_micro_batches


def pack_answers(
    tokens: np.ndarray,
    prompts: np.ndarray,
    answers: np.ndarray,
    groups: Sequence[np.ndarray],
    counted,
    rows: int,
    most: int,
    ways: int = 1,
    together: int = 1,
    common: np.ndarray | None = None,
) -> PackedParts:
    """Plans the packing of each group of sequences, as numpy arrays.

    Args:
      tokens: int [S, T], prompts followed by their answers; packed rows also have T tokens.
      prompts: int [S], the number of tokens of each prompt.
      answers: int [S], the number of tokens of each answer.
      groups: the sequence numbers of each group; all groups have the same size.
      counted: bool [S]; sequences that do not count are left out.
      rows: rows per part, see `part_rows`.
      most: the largest number of parts, see `part_rows`.
      ways: the number of devices that share a part's rows; each gets about the same number of tokens.
      together: each run of this many neighbours in a group stays in one part.
      common: int [S], equal for the two sequences of a pair: the length of their shared prefix that is stored once, as a stem
        (`attention.plain.STEM`); 0 stores it twice. None means 0 for all.
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
        follows = (stem > 0) & (np.arange(len(own)) % 2 == 1)  # Its stem is stored with the preceding sequence.
        skipped = np.where(follows, stem, 0)
        length = P + A - skipped
        offset, head, document, row = (np.zeros(len(own), np.int64) for _ in range(4))  # row: counted over all parts
        fitted = _fit(length, follows, T, rows, together)
        count[g] = len(fitted)
        for k, content in enumerate(fitted):
            fullest = sorted(content, key=lambda line: -sum(length[line]))
            for line, place in zip(fullest, _serpentine(rows, ways), strict=False):
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
    """`packing.fit`, but a sequence that uses its neighbour's stem is placed directly after that neighbour."""
    whole = np.where(follows, 0, length + np.where(np.roll(follows, -1), np.roll(length, -1), 0))
    parts = fit(whole, T, rows, together)
    followers = set(np.flatnonzero(follows).tolist())
    if not followers:
        return parts
    with_follower = {i: (i, i + 1) if i + 1 in followers else (i,) for i in range(len(follows)) if i not in followers}
    return [[[j for i in line for j in with_follower.get(i, ())] for line in content] for content in parts]


def _serpentine(rows: int, ways: int) -> list[int]:
    """The place of each row, from the fullest to the emptiest, if rows are assigned to devices in serpentine order."""
    own = rows // ways
    turns = [range(ways) if turn % 2 == 0 else range(ways)[::-1] for turn in range(own)]
    return [way * own + turn for turn, order in enumerate(turns) for way in order]


def pack_groups(
    rollout: Rollout, groups: Sequence[np.ndarray], counted, tokens: int, sharding: Sharding
) -> PackedParts:
    """A plan on the devices for groups of rows of a rollout (numpy). tokens: the limit per device in a part; 0 chooses."""
    rows = part_rows(len(groups[0]), rollout.tokens.shape[1], tokens, *rows_split(sharding))
    plan = pack_answers(
        rollout.tokens, rollout.prompt_length, rollout.response_length, groups, counted, *rows, rows_split(sharding)[0]
    )
    return place_parts(sharding, plan)


def pack_rollout(rollout: Rollout, tokens: int, sharding: Sharding) -> tuple[Rollout, PackedParts]:
    """(a rollout on the devices, all its responses packed with `pack_groups` as one group)."""
    here = fetch(rollout)
    plan = pack_groups(here, [np.arange(len(here.tokens))], here.prompt_length > 0, tokens, sharding)
    return place_rows(sharding, here), jax.tree.map(lambda x: x[0], plan)


def pack_pairs(
    pairs: AnswerPairs | PairBatch, tokens: int, sharding: Sharding, whole: bool = False, branches: bool = False
) -> PackedParts:
    """A plan on the devices for both sequences of the pairs (numpy) that count. A pair's sequences are in the same part.

    Args:
      tokens: the maximum number of tokens per device in a part; 0 chooses automatically.
      whole: put all pairs in one part.
      branches: store a shared prefix once if both sequences then fit into a row (`attention.dispatch.reads_branches`).
    """
    B, _, T = pairs.tokens.shape
    length, (ways, unit) = pairs.length.reshape(-1), rows_split(sharding)
    prompts = pairs.prompt_length.reshape(-1) if isinstance(pairs, AnswerPairs) else length
    rows = pair_rows(B, T, tokens, ways, unit, whole)
    common = np.repeat(_common(pairs.tokens, pairs.length, prompts.reshape(B, 2)), 2) if branches else None
    tokens, counted = pairs.tokens.reshape(2 * B, T), np.repeat(pairs.weight > 0, 2)
    plan = pack_answers(tokens, prompts, length - prompts, [np.arange(2 * B)], counted, *rows, ways, 2, common)
    return place_parts(sharding, jax.tree.map(lambda x: x[0], plan))


def _common(tokens: np.ndarray, length: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """int [B]: the length of each pair's prefix that is stored once, for tokens [B, 2, T].

    The prefix excludes the last prompt token (without answers, the last token), whose output each sequence reads. The length
    is 0 if the two sequences with a common prefix do not fit into a row of T tokens.
    """
    T = tokens.shape[2]
    common = np.minimum(shared(tokens, length), prompts.min(axis=1) - 1)
    return np.where(length.sum(axis=1) - common <= T, np.maximum(common, 0), 0)


def shared(tokens: np.ndarray, length: np.ndarray) -> np.ndarray:
    """int [B]: the length of the longest common prefix of the two sequences of each pair.

    Args:
      tokens: int [B, 2, T].
      length: int [B, 2].
    """
    equal = np.cumprod(tokens[:, 0] == tokens[:, 1], axis=1).sum(axis=1)
    return np.minimum(equal, length.min(axis=1))


def pair_rows(B: int, T: int, tokens: int, ways: int = 1, unit: int = 1, whole: bool = False) -> tuple[int, int]:
    """`part_rows` for B pairs, none of which is split between parts. whole: put all pairs in one part."""
    unit = math.lcm(unit, 2)
    return (-(-2 * B // unit) * unit, 1) if whole else part_rows(2 * B, T, tokens, ways, unit)


def _ranges(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the range's number, the position in the range) for each element of consecutive ranges of these lengths."""
    of = np.repeat(np.arange(len(lengths)), lengths)
    return of, np.arange(len(of)) - (np.cumsum(lengths) - lengths)[of]


def place_parts(sharding: Sharding, parts: PackedParts) -> PackedParts:
    """Places a plan on the devices: rows are split over the mesh's batch axes, everything else is replicated."""

    def placed(x: np.ndarray) -> jax.Array:
        split = x.ndim > parts.part.ndim  # [..., K, R, T], and not [..., B] or [...]
        axes = (None,) * (x.ndim - 2) + ("batch", None) if split else (None,) * x.ndim
        return jax.make_array_from_callback(x.shape, sharding.named(axes), lambda window: x[window])

    return jax.tree.map(placed, parts)


def alone(rollout: Rollout) -> AnswerRows:
    """The sequences of a rollout, unpacked: each has its own row."""
    B, T = rollout.tokens.shape
    N, place = rollout.logprobs.shape[1], jnp.arange(B, dtype=jnp.int32)
    return AnswerRows(
        rollout.tokens, None, None, response_positions(rollout.prompt_length, N) - 1, place * T, place * N
    )


def pairs_alone(pairs: AnswerPairs | PairBatch | ScoredPairs) -> AnswerRows:
    """The 2 B sequences of pairs, unpacked: each has its own row. For sequences without answers, `heads` is meaningless."""
    B, _, T = pairs.tokens.shape
    prompts = (pairs.prompt_length if isinstance(pairs, AnswerPairs) else pairs.length).reshape(2 * B)
    place = jnp.arange(2 * B, dtype=jnp.int32) * T
    return AnswerRows(pairs.tokens.reshape(2 * B, T), None, None, response_positions(prompts, T) - 1, place, place)


def answer_parts(batch: AnswerPairs | PairBatch | Experience, packed: PackedParts | None) -> Parts:
    """The micro-batches of pairs or of an experience, each (batch, AnswerRows): the whole batch, with weight 0 for pairs or
    responses that are not in the part.

    Args:
      packed: the plan; None gives one micro-batch in which each sequence has its own row.
    """
    is_pairs = not isinstance(batch, Experience)
    if packed is None:
        return Parts(lambda _: (batch, pairs_alone(batch) if is_pairs else alone(batch.rollout)), 1)

    def of(i):
        rows, inside = take_part(packed, i)
        inside = inside[::2] if is_pairs else inside
        return dataclasses.replace(batch, weight=jnp.where(inside, batch.weight, 0.0)), rows

    return Parts(of, packed.count)


def take_part(parts: PackedParts, i) -> tuple[AnswerRows, jax.Array]:
    """(the rows of part i; bool [B]: whether each sequence is in it)."""
    rows = parts.rows
    own = (x[i] for x in (rows.tokens, rows.segment_ids, rows.positions, rows.heads))
    return AnswerRows(*own, rows.start, rows.first, rows.used[i]), parts.part == i


def of_answers(values, first, N: int) -> jax.Array:
    """[B, N]: values at the answer tokens of each sequence, gathered from [R, M].

    Args:
      first: int32 [B], the flat index in [R, M] of each sequence's first answer token.
      N: the longest answer. Positions past the end of an answer have values of other answers: mask them by length.
    """
    chex.assert_rank(first, 1)
    place = first[:, None] + jnp.arange(N, dtype=jnp.int32)[None, :]
    return values.reshape(-1)[jnp.clip(place, 0, values.size - 1)]


def each_part(parts: PackedParts, fn):
    """The results of `fn(rows) -> pytree of [B, ...]` for every sequence, computed one part after another; 0 for sequences in
    no part."""

    def one(i):
        rows, inside = take_part(parts, i)
        return fn(rows), inside

    one_once, (shapes, _) = traced(one, jax.ShapeDtypeStruct((), jnp.int32))

    def take(i, results):
        own, inside = one_once(i)
        return jax.tree.map(lambda new, old: jnp.where(inside.reshape(-1, *(1,) * (new.ndim - 1)), new, old), own, results)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, parts.count, take, zeros)
