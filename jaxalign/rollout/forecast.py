"""Finds the programs that a queue will need before they run, by simulating its session without a device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxalign.models.cache import Tiers
from jaxalign.parallel.ahead import Ahead, told_only
from jaxalign.parallel.rows import placed
from jaxalign.rollout.decode import NOTHING, Drawn, decode_chunk
from jaxalign.rollout.layouts import Layout, single
from jaxalign.rollout.ring import prefill, reroll
from jaxalign.rollout.session import LEFT, STEPS, Session

Described = tuple[Callable, tuple]
"""(jitted function, its arguments): what `Ahead.add` takes."""
WAVES = 4
"""The most prompts per slot that are simulated; more of them need no other programs."""
CHUNKS = 256
"""The most chunks that are simulated. A ring grows by doubling, so the programs of long responses appear early."""

_known: set = set()  # Programs that are compiled or being compiled.
_begun: set = set()  # Kinds of queues whose programs are known.


def compile_ahead(ahead: Ahead, session: Session) -> None:
    """Compiles, in threads, the programs that a session's queue needs and that this process does not have yet.

    A failure is logged and is no error. With several processes nothing is compiled ahead: the threads of two processes may get
    to different programs before the queue is done, and some compilers share their work.
    """
    if jax.process_count() > 1:
        return
    with told_only("sampling"):
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
    """Each program that a queue will need, once, in the order in which it comes to; nothing is run.

    session: as it begins, with its prompts; its parameters and key may be ShapeDtypeStructs with their places. When rows end
    is not known: where a token ends a response, responses are taken to be of all lengths, evenly.
    """
    batch, prompts = session.batch, [row.prompt for row in session.queue]  # By length, equal ones side by side.
    if len(prompts) > WAVES * batch:  # Waves as they stand: the shortest, the longest, and some between.
        begins = np.linspace(0, len(prompts) - batch, WAVES).astype(int).tolist()
        prompts = [prompt for begin in begins for prompt in prompts[begin : begin + batch]]
    played = _Played(session)
    played.submit(prompts, range(len(prompts)))
    for _ in range(CHUNKS):
        if not played.unfinished:
            break
        played.step()
    return list(played.programs.values())


def know(step: Callable, arguments: tuple) -> bool:
    """Remembers a program that is compiled or will be; returns whether it was unknown."""
    key = _key(step, _described(arguments))
    new = key not in _known
    _known.add(key)
    return new


def forget() -> None:
    """Forgets every program; call it after `jax.clear_caches`."""
    _known.clear()
    _begun.clear()


def _kind(session: Session) -> tuple:
    """A key that is equal for queues with the same, or nearly the same, programs."""
    lengths = frozenset(session.padded(len(row.prompt)) for row in session.queue)
    count = -(-len(session.queue) // session.parts)
    rows = next((size for size in session.sizes if size >= count), None)
    waves = min(len(session.queue) // session.batch, WAVES)
    places = frozenset(_place(leaf.sharding) for leaf in jax.tree.leaves(_described(session.params)))
    return (session.source, jax.tree.structure(session.params), places, session.sampling, session.new,
            session.batch, session.max_length, session.bucket, lengths, rows, waves)  # fmt: skip


def _bound(params) -> bool:
    """Whether the weights, and so the results of programs, are committed to devices."""
    return any(leaf.sharding is not None for leaf in jax.tree.leaves(_described(params)))


def _described(tree: Any) -> Any:
    """Arrays as ShapeDtypeStructs, with a sharding where they are committed."""
    def one(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)


def _key(step: Callable, described: tuple) -> tuple:
    """Identifies a program. How arrays lie on a mesh follows from the model among the arguments; the single device of a model
    without a mesh does not."""
    leaves, structure = jax.tree.flatten(described)
    what = ((x.shape, x.dtype, _place(x.sharding)) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
    return step, structure, tuple(what)


def _place(sharding: jax.sharding.Sharding | None) -> jax.Device | bool:
    """The one device of a sharding; True for a mesh of several, False where there is none."""
    if sharding is None:
        return False
    return next(iter(sharding.device_set)) if len(sharding.device_set) == 1 else True


class _Played(Session):
    """A session that records its programs and runs none; rings and prompts are ShapeDtypeStructs."""

    def __init__(self, session: Session):
        sampling = dataclasses.replace(session.sampling, max_new_tokens=session.new)
        params, key = _described((session.params, session.key))
        super().__init__(session.source, params, key, sampling, session.batch, session.max_length, session.bucket)
        self._bound, stops = _bound(params), set(sampling.stop_ids)
        self._word = next(token for token in itertools.count() if token not in stops)
        self.programs: dict[tuple, Described] = {}
        self._ends: dict[int, int] = {}  # After how many tokens each row is taken to end.
        self._random = np.random.default_rng(0)

    def call(self, step: Callable, *arguments):
        described = _described(arguments)
        self.programs.setdefault(_key(step, described), (step, described))
        if step is decode_chunk:
            return arguments[2], self._drawn(arguments[5])
        if step is prefill:
            rows, slots = arguments[2].shape
            made = self._empty(single(rows // self.parts, slots))[0]
            return made if self._bound else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)
        return self._empty(arguments[4]) if step is reroll else arguments[1]

    def _empty(self, layout: Layout) -> Tiers:
        rings = zip(*layout, strict=True)
        return tuple(placed(self.model.abstract_cache(rows * self.parts, slots), self.params) for rows, slots in rings)

    def _place(self, array: np.ndarray, axes: tuple[str | None, ...]):
        sharding = self.model.sharding
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding and sharding.named(axes))

    def _drawn(self, control: np.ndarray) -> Drawn:
        """A simulated result of a chunk: the number of tokens of each row, and which of them end it."""
        stops, _, most, quota = self.sampling.stop_ids, *control.tolist()
        left = {slot: self._end(row.index) + int(self.rows[LEFT, slot]) - self.new for slot, row in self.live.items()}
        steps = min(most, sorted(left.values())[min(quota, len(left)) - 1])
        tokens = np.full((STEPS, self._size * self.parts), NOTHING, np.int32)
        for slot, count in left.items():
            tokens[: min(count, steps), slot] = self._word
            if count <= steps and stops:
                tokens[count - 1, slot] = stops[0]
        return Drawn(tokens, np.zeros(tokens.shape, np.float32), np.int32(steps))

    def _end(self, index: int) -> int:
        if index not in self._ends:
            self._ends[index] = int(self._random.integers(1, self.new + 1)) if self.sampling.stop_ids else self.new
        return self._ends[index]
