"""The programs that a queue will need, found before they run: its session is played through without a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxalign.models.cache import Tiers
from jaxalign.parallel.ahead import Ahead, told_only
from jaxalign.parallel.rows import placed
from jaxalign.rollout.decode import NOTHING, Drawn, decode_chunk
from jaxalign.rollout.layouts import Layout, single
from jaxalign.rollout.ring import prefill, reroll
from jaxalign.rollout.session import STEPS, Session

Described = tuple[Callable, tuple]
"""(jitted function, its arguments): what `Ahead.add` takes."""
WAVES = 4
"""Prompts a slot that are played through at most, of all lengths; more ask for nothing else."""

_known: set = set()  # Programs.
_begun: set = set()  # Kinds of queues.


def compile_ahead(ahead: Ahead, session: Session) -> None:
    """Begins to compile what the queue of a session needs and this process has not been told of before. What cannot be
    described is told, and no error. Of several processes none does so: which programs a thread gets to before the queue is
    done may differ, and some compilers share their work.
    """
    if jax.process_count() > 1 or not _is_new(session):
        return
    with told_only("sampling"):
        for step, arguments in forecast(session):
            if know(step, arguments):
                ahead.add(step, arguments)


def forecast(session: Session) -> list[Described]:
    """Each program that a queue will need, once, in the order in which it comes to; nothing is run.

    session: as it begins, with its prompts; its parameters and key may be ShapeDtypeStructs with their places. When rows end
    is not known: where a token ends a response, responses are taken to be of all lengths, evenly.
    """
    most, prompts = WAVES * session.batch, [row.prompt for row in session.queue]  # By length.
    if len(prompts) > most:
        prompts = [prompts[at] for at in np.linspace(0, len(prompts) - 1, most).astype(int)]
    played = _Played(session)
    played.submit(prompts, range(len(prompts)))
    while played.unfinished:
        played.step()
    return list(played.programs.values())


def know(step: Callable, arguments: tuple) -> bool:
    """Remembers a program that is there, or will be; whether it was not known."""
    key = _key(step, _described(arguments))
    new = key not in _known
    _known.add(key)
    return new


def forget() -> None:
    """For who throws compiled programs away: none is known any more."""
    _known.clear()
    _begun.clear()


def _is_new(session: Session) -> bool:
    """Whether no queue was begun before that `forecast` would find the same programs for, or nearly so."""
    lengths = frozenset(session.padded(len(row.prompt)) for row in session.queue)
    waves = min(len(session.queue) // session.batch, WAVES)
    kind = (session.source, jax.tree.structure(session.params), session.sampling, session.new, session.batch,
            session.max_length, session.bucket, lengths, waves)  # fmt: skip
    new = kind not in _begun
    _begun.add(kind)
    return new


def _described(tree: Any) -> Any:
    """Arrays as ShapeDtypeStructs, with a place where they are bound to one."""
    def one(leaf):
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return jax.tree.map(one, tree)


def _key(step: Callable, described: tuple) -> tuple:
    """Tells programs apart. Where arrays lie follows from the model among the arguments, and can be said in many ways."""
    leaves, structure = jax.tree.flatten(described)
    what = ((x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)
    return step, structure, tuple(what)


class _Played(Session):
    """A session whose programs are written down and not run; rings and prompts are ShapeDtypeStructs."""

    def __init__(self, session: Session):
        sampling = dataclasses.replace(session.sampling, max_new_tokens=session.new)
        params, key = _described((session.params, session.key))
        super().__init__(session.source, params, key, sampling, session.batch, session.max_length, session.bucket)
        self._bound = any(leaf.sharding is not None for leaf in jax.tree.leaves(params))  # To devices, and what they make too.
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
        sizes = zip(layout.rows, layout.slots, strict=True)
        return tuple(placed(self.model.abstract_cache(rows * self.parts, slots)) for rows, slots in sizes)

    def _place(self, array: np.ndarray, axes: tuple[str | None, ...]):
        sharding = self.model.sharding
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding and sharding.named(axes))

    def _drawn(self, control: np.ndarray) -> Drawn:
        """What a chunk would draw, as far as a session looks at it: how many tokens, and which of them ends a row."""
        stops, _, most, quota = self.sampling.stop_ids, *control.tolist()
        word = next(token for token in itertools.count() if token not in stops)
        left = {slot: self._end(row.index) - row.written for slot, row in self.live.items()}
        steps = min(most, sorted(left.values())[min(quota, len(left)) - 1])
        tokens = np.full((STEPS, self._size * self.parts), NOTHING, np.int32)
        for slot, count in left.items():
            tokens[: min(count, steps), slot] = word
            if count <= steps and stops:
                tokens[count - 1, slot] = stops[0]
        return Drawn(tokens, np.zeros(tokens.shape, np.float32), np.int32(steps))

    def _end(self, index: int) -> int:
        if index not in self._ends:
            self._ends[index] = int(self._random.integers(1, self.new + 1)) if self.sampling.stop_ids else self.new
        return self._ends[index]
