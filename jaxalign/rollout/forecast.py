"""Predicts the programs that a queue needs, by simulating its session without a device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxalign.models.cache import Tiers
from jaxalign.parallel.ahead import Ahead, log_errors
from jaxalign.rollout.layouts import Layout, single
from jaxalign.rollout.responses import SampledRow
from jaxalign.rollout.ring import DECODING, NOTHING, Drawn, exchange, insert, prefill, prefill_after, reroll
from jaxalign.rollout.session import LEFT, STEPS, Session

Described = tuple[Callable, tuple]
"""(jitted function, its arguments), as `Ahead.add` takes them."""
WAVES = 4
"""The maximum number of simulated prompts per row; more prompts need no additional programs."""
SHRINKING = ("gpu", "tpu")
"""Platforms for which the programs of fewer rows are compiled ahead although responses may not need them."""
CHUNKS = 256
"""The maximum number of simulated chunks. A ring grows by doubling, so the programs of long responses appear early."""

_known: set = set()  # Programs that are compiled or being compiled.
_begun: set = set()  # Keys (`_kind`) of queues whose programs are known.


def compile_ahead(ahead: Ahead, session: Session) -> None:
    """Compiles, in threads, the programs that a session's queue needs and that this process has not compiled yet.

    A failure is logged, not raised. With several processes nothing is compiled ahead: when the queue ends, the threads of two
    processes may have started different programs, and some compilers share work among processes.
    """
    if jax.process_count() > 1:
        return
    with log_errors("sampling"):
        kind = _kind(session)
        if kind in _begun:
            return
        for step, arguments in forecast(session):
            if know(step, arguments):
                ahead.add(step, arguments).add_done_callback(functools.partial(_ended, kind, _key(step, arguments)))
        _begun.add(kind)


def _ended(kind: tuple, key: tuple, future: Future) -> None:
    """Forgets a program whose compilation was cancelled or failed."""
    if future.cancelled() or future.result() is None:
        _known.discard(key)
        _begun.discard(kind)


def forecast(session: Session) -> list[Described]:
    """The distinct programs that a queue will need, in the order of their first use; runs nothing.

    session: a session with its prompts, before its first step; its parameters may be ShapeDtypeStructs with shardings.
    The lengths of responses are unknown: if stop tokens exist, they are drawn uniformly. On a CPU the forecast then ends where
    fewer rows would decode together: compiling takes cores from sampling, and long responses may never need these programs.
    """
    batch, rows = session.batch, list(session.queue)  # Sorted by length; equal prompts are adjacent.
    if len(rows) > WAVES * batch:  # Evenly spaced batches of the queue: the shortest, the longest, and some between.
        begins = np.linspace(0, len(rows) - batch, WAVES).astype(int).tolist()
        rows = [row for begin in begins for row in rows[begin : begin + batch]]
    played = _Played(session)
    played.enqueue([SampledRow(index, row.prompt, row.number, row.sampling, row.settings) for index, row in enumerate(rows)])
    for _ in range(CHUNKS):
        if not played.unfinished or played.shrank:
            break
        played.step()
    return list(played.programs.values())


def know(step: Callable, arguments: tuple) -> bool:
    """Registers a program that is or will be compiled; returns whether it is new."""
    key = _key(step, _described(arguments))
    new = key not in _known
    _known.add(key)
    return new


def forget() -> None:
    """Forgets every program; call it after `jax.clear_caches`."""
    _known.clear()
    _begun.clear()


def release_programs() -> None:
    """Frees all compiled programs of sampling. A later call compiles its program again, or reads it from the compile cache."""
    for program in (prefill, prefill_after, insert, exchange, reroll, *DECODING):
        program.clear_cache()
    forget()


def _kind(session: Session) -> tuple:
    """A key that is equal for queues that need the same, or nearly the same, programs."""
    lengths = frozenset(session.padded(len(row.prompt)) for row in session.queue)
    shared = frozenset(
        (len(group.prompts), max(map(len, group.prompts)), group.shared) for group in session.prefills.related.values()
    )
    count = -(-len(session.queue) // session.parts)
    rows = next((size for size in session.sizes if size >= count), None)
    waves = min(len(session.queue) // session.batch, WAVES)
    return (session.source, jax.tree.structure(session.params), session.variant, session.fields, session.stops,
            session.least_new, session.longest, session.batch, session.max_length, session.bucket, lengths, shared, rows, waves)


def _described(tree: Any) -> Any:
    """Arrays as ShapeDtypeStructs, with a sharding if they are committed."""
    def one(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)


def _key(step: Callable, described: tuple) -> tuple:
    """A key that identifies a program. The model, one of the arguments, determines the shardings."""
    leaves, structure = jax.tree.flatten(described)
    described = ((x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
    return step, structure, tuple(described)


class _Played(Session):
    """A session that records its programs instead of running them; rings and prompts are ShapeDtypeStructs."""

    def __init__(self, session: Session):
        sizes = session.batch, session.max_length, session.bucket
        super().__init__(session.source, session.params, *sizes, share_prefix=session.prefills.shares)
        self.params = _described(session.params)  # They are already placed for generation.
        self.variant, self.fields, self.stops = session.variant, session.fields, session.stops
        self.least_new, self.longest = session.least_new, session.longest
        self.programs: dict[tuple, Described] = {}
        self.shrank = False  # Whether the forecast has ended, because fewer rows would decode together.
        self._ends: dict[int, int] = {}  # The assumed length of each row's response.
        self._random = np.random.default_rng(0)

    def call(self, step: Callable, *arguments):
        described = _described(arguments)
        if step is reroll and self.stops and self.model.sharding.platform not in SHRINKING:
            self.shrank = self.shrank or arguments[4].size < self.layout.size
        if not self.shrank:
            self.programs.setdefault(_key(step, described), (step, described))
        if step in DECODING:
            return arguments[2], self._drawn(arguments[4])
        if step in (prefill, prefill_after):
            rows = arguments[-1].shape[0]
            slots = sum(x.shape[1] for x in arguments[2:] if x.ndim == 2)
            return self.rings(single(rows // self.parts, slots))[0]
        return self.rings(arguments[4]) if step is reroll else arguments[1]

    def rings(self, layout: Layout) -> Tiers:
        rings = zip(*layout, strict=True)
        return tuple(self.model.abstract_cache(rows * self.parts, slots) for rows, slots in rings)

    def _place(self, array: np.ndarray, axes: tuple[str | None, ...]):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.model.sharding.named(axes))

    def _drawn(self, control: np.ndarray) -> Drawn:
        """The simulated result of a chunk: the number of tokens of each row, and the stop tokens."""
        _, most, quota = control.tolist()
        left = {}
        for slot, row in self.live.items():
            longest = row.sampling.max_new_tokens
            if row.index not in self._ends:
                self._ends[row.index] = int(self._random.integers(1, longest + 1)) if row.sampling.stop_ids else longest
            left[slot] = self._ends[row.index] + int(self.rows[LEFT, slot]) - longest
        steps = min(most, sorted(left.values())[min(quota, len(left)) - 1])
        tokens = np.full((STEPS, self.layout.size * self.parts), NOTHING, np.int32)
        for slot, count in left.items():
            stop_ids = self.live[slot].sampling.stop_ids
            tokens[: min(count, steps), slot] = next(token for token in itertools.count() if token not in stop_ids)
            if count <= steps and stop_ids:
                tokens[count - 1, slot] = stop_ids[0]
        return Drawn(tokens, np.zeros(tokens.shape, np.float32), np.int32(steps))
