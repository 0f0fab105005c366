"""Compiles every program that sampling can need, by running each once."""

from __future__ import annotations

import itertools

import jax
import numpy as np

from jaxalign.rollout import forecast
from jaxalign.rollout.layouts import LONG, Layout, in_tiers, neighbours, prefill_sizes, row_counts, single, slot_counts
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.session import Session


def warm_up(engine: Engine, params, sampling: Sampling, longest: int) -> None:
    """Run every program that prompts of at most `longest` tokens can need, with rings of every size that they can reach."""
    session = engine.start(params, [], jax.random.key(0), sampling, [])
    call = session.call

    def known(step, *arguments):
        forecast.know(step, arguments)
        return call(step, *arguments)

    session.call = known
    try:
        _run_all(session, longest)
    finally:
        del session.call  # Break the reference cycle so that the weights are freed promptly.


def _run_all(session: Session, longest: int) -> None:
    parts, most, platform = session.parts, session.sizes[-1], session.model.sharding.platform
    lengths = _lengths(session, longest)
    made = []
    for length in lengths:
        for count in sorted(set(prefill_sizes(length, parts, most, platform))):
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
    """Return the padded lengths of prompts of at most `longest` tokens, without prompts too long for the model."""
    lengths, longest = [session.padded(1)], min(longest, session.max_length - session.least_new)
    while lengths[-1] < longest:
        lengths.append(session.padded(lengths[-1] + 1))
    return lengths


def _layouts(session: Session, lengths: list[int]) -> dict[Layout, set[Layout]]:
    """Return every layout with the layouts that can follow it. The ring fits the longest prompt so far, and a longer prompt can
    arrive while others decode."""
    found: dict[Layout, set[Layout]] = {}
    every = [slot_counts(length + session.least_new, session.max_length) for length in lengths]
    for shorter, counts in enumerate(every):
        for waves in (1, LONG):
            sizes = row_counts(session.batch // session.parts, waves)
            made = [single(size, slots) for size in sizes for slots in counts]
            made += [layout for layout in [in_tiers(sizes[-1], counts[-1])] if layout]
            for layout, later in itertools.product(made, every[shorter:]):
                found.setdefault(layout, set()).update(neighbours(layout, sizes, later))
    return found
