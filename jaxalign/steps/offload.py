"""Offloads to host memory the arrays that a phase does not need: `config.mesh.offload`.

Arrays are moved between phases, outside of jitted programs, and return with the same sharding, so results do not change. Of the
arrays that may be offloaded, a device holds

- while sampling: none;
- while scoring: the frozen role that scores, and no optimizer state;
- in the update: the optimizer state, and the reference only if the loss runs it (`ppo.kl_in` loss with `kl_estimator` full);
- at the start: one at a time, while it is created or read. A restored optimizer state is read directly into host memory.

The policy, the critic and the base under adapters are never offloaded, since every phase reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxalign.config import Mesh
from jaxalign.errors import UserError
from jaxalign.steps.state import TrainState

HOST = "pinned_host"


def check_host_memory(settings: Mesh, devices: Sequence[jax.Device] | None = None) -> None:
    """Raises UserError if offloading is configured but the devices (default: those of this process) cannot address host
    memory."""
    device = (devices or jax.local_devices())[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if settings.offload and HOST not in kinds:
        raise UserError(f"config.mesh.offload is {settings.offload}, but {device.device_kind} ({device.platform}) has no "
                        f"memory {HOST!r}, only {', '.join(map(repr, kinds))}; leave mesh.offload empty")


def to_host(tree: Any, shared: Any = None) -> Any:
    """Copies arrays to host memory, waits for the copies, and frees the device buffers.

    Args:
      tree: arrays; or ShapeDtypeStructs, which get shardings in host memory, so that a restore reads into host memory.
      shared: arrays of `tree` that stay on the devices.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(shared)}

    def start(leaf):
        # Scalars are not offloaded: they are small, and some host memories lay them out differently.
        if id(leaf) in kept or leaf.ndim == 0:
            return leaf
        where = leaf.sharding.with_memory_kind(HOST)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        return jax.device_put(leaf, where)

    moved = jax.tree.map(start, tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(moved), strict=True):
        if new is not old and isinstance(old, jax.Array):
            # The next phase may need the memory immediately.
            new.block_until_ready()
            old.delete()
    return moved


def to_device(tree: Any, keep: bool = False) -> Any:
    """The inverse of `to_host`. keep: whether to keep the copy in host memory."""

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
    """Parameters that are never trained, such as those of a reference or of a reward model.

    Args:
      params: the parameters. With `offload`, their device buffers are freed.
      offload: keep the parameters in host memory, with a copy on the devices only within `on_device`.
      shared: parameters that stay on the devices, such as the base under adapters.
    """

    def __init__(self, params: Any, offload: bool = False, shared: Any = None):
        self.offloaded = offload
        self._params = to_host(params, shared) if offload else params

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Any]:
        """The parameters on the devices, for computations that are dispatched within the context."""
        here = to_device(self._params, keep=True)
        try:
            yield here
        finally:
            for own, lent in zip(jax.tree.leaves(self._params), jax.tree.leaves(here), strict=True):
                if lent is not own:
                    lent.delete()  # The buffer stays alive until the dispatched computations that use it end.


def move_optimizer_state(state: Any, move: Callable[[Any], Any]) -> Any:
    """A TrainState or PPOState, concrete or abstract, with its optimizer states moved. move: `to_host` or `to_device`."""

    def moved(x: Any) -> Any:
        if not isinstance(x, TrainState):
            return x
        return dataclasses.replace(x, opt_state=move(x.opt_state))

    return jax.tree.map(moved, state, is_leaf=lambda x: isinstance(x, TrainState))
