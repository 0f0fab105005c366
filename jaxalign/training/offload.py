"""What a phase does not need lies in host memory: `config.mesh.offload`.

Arrays are moved between phases, outside of jitted programs, each whole and back to where it lay, so no result changes. Of the
parts that may move, a device holds

- while it samples: none;
- while it scores: the one frozen role that is scoring, and no optimizer state;
- in the update: the optimizer state, and the reference only where the loss runs it (`ppo.kl_in` loss with `kl_estimator` full);
- at the start, for a moment, each of them by turns, as it is made or read. A restored optimizer state is read into host memory.

The policy, the critic and a base under adapters, which every phase reads, stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.training.state import TrainState

HOST = "pinned_host"


def check_host_memory(settings: Mesh, devices: Sequence[jax.Device] | None = None) -> None:
    """Raises UserError where something is to be offloaded and the run's devices (default: this process's) cannot address host
    memory."""
    device = (devices or jax.local_devices())[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if settings.offload and HOST not in kinds:
        raise UserError(f"config.mesh.offload is {settings.offload}, but {device.device_kind} ({device.platform}) has no "
                        f"memory {HOST!r}, only {', '.join(map(repr, kinds))}; leave mesh.offload empty")


def _moves(leaf: Any) -> bool:
    """Counters stay: they are nothing, and small arrays have layouts of their own in some host memories."""
    return leaf.ndim > 0


def to_host(tree: Any, shared: Any = None) -> Any:
    """The arrays in host memory, when all have arrived there; their device buffers are freed, but for those that are `shared`,
    which stay. ShapeDtypeStructs are told so that a restore puts them there."""
    kept = {id(leaf) for leaf in jax.tree.leaves(shared)}

    def start(leaf):
        if id(leaf) in kept or not _moves(leaf):
            return leaf
        where = leaf.sharding or SingleDeviceSharding(jax.local_devices()[0])
        where = where.with_memory_kind(HOST)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        return jax.device_put(leaf, where)

    moved = jax.tree.map(start, tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(moved), strict=True):
        if new is not old and isinstance(old, jax.Array):
            # What follows may need the room at once.
            new.block_until_ready()
            old.delete()
    return moved


def to_device(tree: Any, keep: bool = False) -> Any:
    """The inverse of `to_host`. keep: the host's copy stays too."""

    def back(leaf):
        if leaf.sharding.memory_kind != HOST:
            return leaf
        device = next(iter(leaf.sharding.addressable_devices))
        moved = jax.device_put(leaf, leaf.sharding.with_memory_kind(device.default_memory().kind))
        if not keep:
            leaf.delete()
        return moved

    return jax.tree.map(back, tree)


class FrozenRole:
    """Parameters that are never trained: of a reference, or of a model that scores.

    With `offload` they lie in host memory, and a copy on the devices while `on_device` lasts; `params` is used up. What is part
    of `shared` (a base under adapters) stays on the devices.
    """

    def __init__(self, params: Any, offload: bool = False, shared: Any = None):
        self.offloaded = offload
        self._params = to_host(params, shared) if offload else params

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The parameters, for computations that are begun before it ends."""
        here = to_device(self._params, keep=True)
        try:
            yield here
        finally:
            for own, lent in zip(jax.tree.leaves(self._params), jax.tree.leaves(here), strict=True):
                if lent is not own:
                    lent.delete()  # Computations under way still hold it.


def _optimizers(state: Any, move) -> Any:
    """`state` with the optimizer state of every TrainState in it moved."""
    is_state = lambda x: isinstance(x, TrainState)  # noqa: E731
    change = lambda x: dataclasses.replace(x, opt_state=move(x.opt_state)) if is_state(x) else x  # noqa: E731
    return jax.tree.map(change, state, is_leaf=is_state)


def optimizer_to_host(state: Any) -> Any:
    """A TrainState or PPOState, or its description for a restore, with optimizer states in host memory."""
    return _optimizers(state, to_host)


def optimizer_to_device(state: Any) -> Any:
    return _optimizers(state, to_device)
