"""All programs of a session, compiled ahead of the first prompt: by running them, or described, to be compiled meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.parallel.rows import placed
from jaxalign.rollout.decode import decode_chunk
from jaxalign.rollout.layouts import LONG, Layout, in_tiers, neighbours, prefill_sizes, row_counts, single, slot_counts
from jaxalign.rollout.ring import exchange, insert, prefill, reroll
from jaxalign.rollout.session import FEW, STEPS, Session


def warm_up(session: Session, longest: int) -> None:
    """Runs every program that prompts of at most `longest` tokens can need, over rings of every size that they can reach."""
    parts, most = session.parts, session.sizes[-1]
    lengths = _lengths(session, longest)
    made = []
    for length in lengths:
        for count in sorted(set(prefill_sizes(length, parts, most))):
            made.append(session.prefill(np.zeros((parts, count, length), np.int32)))
    for layout, others in _layouts(session, lengths).items():
        session.empty(layout)
        for prompts in made:
            session.enter(prompts, [[] for _ in range(parts)])
        if layout.tiered:
            session.exchange(np.full((parts, layout.rows[1], 2), -1, np.int32))
        session.chunk()
        for other in others:
            session.relayout(other)
            session.empty(layout)
    session.tiers = None


def _lengths(session: Session, longest: int) -> list[int]:
    """What prompts of at most `longest` tokens are padded to; longer ones than there is room for are refused."""
    lengths, longest = [session.padded(1)], min(longest, session.max_length - session.new)
    while lengths[-1] < longest:
        lengths.append(session.padded(lengths[-1] + 1))
    return lengths


def _layouts(session: Session, lengths: list[int]) -> dict[Layout, set[Layout]]:
    """Every layout, with what it may become. The ring is as large as the longest prompt so far asks for, and a longer one may
    come while others decode."""
    found: dict[Layout, set[Layout]] = {}
    every = [slot_counts(length + session.new) for length in lengths]
    for shorter, counts in enumerate(every):
        for waves in (1, LONG):
            sizes = row_counts(session.batch // session.parts, waves)
            made = [single(size, slots) for size in sizes for slots in counts]
            made += [layout for layout in [in_tiers(sizes[-1], counts[-1])] if layout]
            for layout, later in itertools.product(made, every[shorter:]):
                found.setdefault(layout, set()).update(neighbours(layout, sizes, later))
    return found


Described = list[tuple[Callable, tuple]]
"""(jitted function, its arguments): what `Ahead.add` takes."""


def described(session: Session, longest: int, fresh: int) -> tuple[Described, Described]:
    """(the programs for a queue of as many prompts as there are slots, those that it can need besides when rows have ended).

    longest: of the prompts; fresh: how many of them differ. session: its parameters and key are ShapeDtypeStructs, placed, as
    sampling reads them. Nothing is run.
    """
    model, slot, parts = session.model, jax.ShapeDtypeStruct((), jnp.int32), session.parts
    length, sizes = session.padded(longest), session.sizes
    few, most = prefill_sizes(length, parts, sizes[-1])
    count = few if -(-fresh // parts) <= FEW * few else most
    counts = [x for x in slot_counts(length + session.new) if x >= longest - 1 + min(session.new, STEPS)]
    cache = lambda rows, slots: placed(model.abstract_cache(rows * parts, slots))  # noqa: E731
    rings = lambda layout: tuple(itertools.starmap(cache, zip(*layout, strict=True)))  # noqa: E731

    def numbers(*shape: int, batch: int = 0) -> jax.ShapeDtypeStruct:
        """As `Session._place` puts them, split along axis `batch`."""
        where = model.sharding and model.sharding.named(tuple("batch" if i == batch else None for i in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    def chunk(layout: Layout) -> tuple[Callable, tuple]:
        rows, control = numbers(4, layout.size * parts, batch=1), jax.ShapeDtypeStruct((3,), jnp.int32)
        drawn = session.key, control, jax.ShapeDtypeStruct((), jnp.float32), session.sampling
        return decode_chunk, (model, session.params, rings(layout), rows, *drawn, STEPS)

    def relayout(layout: Layout, other: Layout) -> tuple[Callable, tuple]:
        return reroll, (model, rings(layout), numbers(parts, other.size), slot, other)

    def enter(layout: Layout) -> tuple[Callable, tuple]:
        plan = numbers(parts, len(layout.rows), max(layout.rows), 3)
        return insert, (model, rings(layout), cache(count, length), plan, slot)

    growing = [single(sizes[-1], slots) for slots in counts]
    first = [(prefill, (model, session.params, numbers(count * parts, length))), enter(growing[0]), chunk(growing[0])]
    tiered = in_tiers(sizes[-1], counts[-1])
    if session.sampling.stop_ids and tiered and len(counts) > 1:  # Rows of all lengths: few of them are long.
        growing[-1] = tiered
        first.append((exchange, (model, rings(tiered), numbers(parts, tiered.rows[1], 2), slot)))
    for layout, larger in itertools.pairwise(growing):
        first += [relayout(layout, larger), chunk(larger)]
    if not session.sampling.stop_ids:  # All rows end together.
        return first, []
    later = []
    for larger, smaller in itertools.pairwise(reversed(sizes)):
        for slots in reversed(counts):
            one, other = single(larger, slots), single(smaller, slots)
            if growing[-1].tiered and larger == sizes[-1] and slots == counts[-1]:
                later.append(relayout(growing[-1], one))
            later += [relayout(one, other), chunk(other)]
        later += [relayout(single(smaller, slots), single(smaller, wider)) for slots, wider in itertools.pairwise(counts)]
    return first, later
