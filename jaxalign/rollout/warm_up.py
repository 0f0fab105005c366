"""All programs of a session, compiled ahead of the first prompt: by running them, or described, to be compiled meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.parallel.rows import placed
from jaxalign.rollout.decode import decode_chunk
from jaxalign.rollout.ring import insert, prefill, reroll
from jaxalign.rollout.session import FEW, STEPS, Session, prefill_sizes, slot_counts


def warm_up(session: Session, longest: int) -> None:
    """Runs every program that prompts of at most `longest` tokens can need, over rings of every size that they can reach."""
    parts, most = session.parts, session.sizes[-1]
    lengths = _lengths(session, longest)
    made = []
    for length in lengths:
        for count in sorted(set(prefill_sizes(length, parts, most))):
            made.append(session.prefill(np.zeros((parts, count, length), np.int32)))
    rings = _rings(session, lengths)
    for at, size in enumerate(session.sizes):
        for slots in rings:
            session.empty(size, slots)
            for prompts in made:
                session.enter(prompts, [[] for _ in range(parts)])
            session.chunk()
            for length in lengths:
                larger = [other for other in slot_counts(length + session.new) if other > slots]
                if larger:
                    session.resize(size, larger[0])
                    session.empty(size, slots)
            for other in session.sizes[max(0, at - 1) : at + 2]:
                session.resize(other, slots)
                session.empty(size, slots)
    session.cache = None


def _lengths(session: Session, longest: int) -> list[int]:
    """What prompts of at most `longest` tokens are padded to."""
    lengths = [session.padded(1)]
    while lengths[-1] < longest:
        lengths.append(session.padded(lengths[-1] + 1))
    return lengths


def _rings(session: Session, lengths: list[int]) -> list[int]:
    """Slots of a ring, which is as large as the longest prompt of a queue asks for."""
    return sorted({slots for length in lengths for slots in slot_counts(length + session.new)})


Described = list[tuple[Callable, tuple]]
"""(jitted function, its arguments): what `Ahead.add` takes."""


def described(session: Session, longest: int, fresh: int) -> tuple[Described, Described]:
    """(the programs for a queue of as many prompts as there are slots, those that it can need besides when rows have ended).

    longest: of the prompts; fresh: how many of them differ. session: its parameters and key are ShapeDtypeStructs, placed, as
    sampling reads them; on one device. Nothing is run.
    """
    model, slot = session.model, jax.ShapeDtypeStruct((), jnp.int32)
    length, size = session.padded(longest), session.sizes[-1]
    few, most = prefill_sizes(length, 1, size)
    count = few if fresh <= FEW * few else most
    numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    cache = lambda rows, slots: placed(model.abstract_cache(rows, slots))  # noqa: E731

    def chunk(rows: int, slots: int) -> tuple[Callable, tuple]:
        control = numbers(4, rows), session.key, numbers(3)
        return decode_chunk, (model, session.params, cache(rows, slots), *control, session.sampling, STEPS)

    def resize(rows: int, slots: int, smaller: int, larger: int) -> tuple[Callable, tuple]:
        return reroll, (model, cache(rows, slots), numbers(1, smaller), slot, larger)

    rings = [x for x in slot_counts(length + session.new) if x >= longest - 1 + min(session.new, STEPS)]
    entering = (model, cache(size, rings[0]), cache(count, length), numbers(1, size, 3), slot)
    first = [(prefill, (model, session.params, numbers(count, length))), (insert, entering), chunk(size, rings[0])]
    for ring, larger in itertools.pairwise(rings):
        first += [resize(size, ring, size, larger), chunk(size, larger)]
    if not session.sampling.stop_ids:  # All rows end together.
        return first, []
    later = []
    for larger, smaller in itertools.pairwise(reversed(session.sizes)):
        for ring in reversed(rings):
            later += [resize(larger, ring, smaller, ring), chunk(smaller, ring)]
        later += [resize(smaller, ring, smaller, wider) for ring, wider in itertools.pairwise(rings)]
    return first, later
