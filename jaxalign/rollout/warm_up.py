"""All programs of a session, compiled ahead of the first prompt."""

from __future__ import annotations

import numpy as np

from jaxalign.rollout.session import Session, prefill_sizes, slot_counts


def warm_up(session: Session, longest: int) -> None:
    """Runs every program that prompts of at most `longest` tokens can need, over rings of every size that they can reach."""
    parts, most = session.parts, session.sizes[-1]
    lengths = [session.padded(1)]
    while lengths[-1] < longest:
        lengths.append(session.padded(lengths[-1] + 1))
    made = []
    for length in lengths:
        for count in sorted(set(prefill_sizes(length, parts, most))):
            made.append(session.prefill(np.zeros((parts, count, length), np.int32)))
    # The ring is as large as the longest prompt of a queue asks for.
    rings = sorted({slots for length in lengths for slots in slot_counts(length + session.new)})
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
