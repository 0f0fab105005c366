"""Whether decoding copies the layers out of their stacks, the arrays with all layers along the first axis.

A slice of a stack is often an array of its own: XLA then copies every layer in every step. Copies that are made once, before a
loop of several steps, need the memory of the layers again.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax

from jaxalign.models.adapters.lora import is_quantised
from jaxalign.parallel.device_memory import stored_bytes, usable_memory
from jaxalign.parallel.sharding import Sharding

if TYPE_CHECKING:
    from jaxalign.models.model import Model

SHARE = 0.25
"""The largest share of a GPU's memory for the copy."""


def unstacks(model: Model, params: Any) -> bool:
    """Whether decoding copies the layers before its loop.

    Args:
      model: the model, with the rules of `Model.generation`.
      params: its weights, also traced ones or ShapeDtypeStructs; with adapters, joined with their base.

    Returns:
      False if decoding scans the layers; otherwise true on CPUs, and on GPUs as in `fits`.
    """
    if not model.layered or model.sharding.platform == "cpu":
        return model.layered
    return fits(model.sharding, layer_bytes(model, params), usable_memory(model.sharding.mesh.devices))


def fits(sharding: Sharding, copied: float, memory: float | None) -> bool:
    """Whether a GPU has memory for the copy, which may need at most `SHARE` of it. Layers that are gathered while they are read
    are not copied.

    Args:
      sharding: the mesh and the rules of sampling.
      copied: bytes of the layers on a device.
      memory: bytes that programs can use, rounded down to GiB so that all processes agree; None if unknown, and then the copy
        does not fit.
    """
    split = any(sharding.mesh.shape[axis] > 1 for name in ("layers", "embed") for axis in sharding.rules[name])
    return not split and memory is not None and copied <= SHARE * (int(memory) >> 30 << 30)


def layer_bytes(model: Model, params: Any) -> float:
    """The bytes on a device of the layers of `params` and their adapters."""
    layers = {name: params[name] for name in ("blocks", "adapters") if name in params}
    return _share_of_a_device(model.base) * sum(stored_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(layers))


@functools.lru_cache(maxsize=64)
def _share_of_a_device(model: Model) -> float:
    """The share of the layers' parameters that a device holds."""
    leaves = jax.tree.leaves(model.abstract()["blocks"])
    here = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return here / sum(leaf.size for leaf in leaves)


def has_quantised_layers(params: Any) -> bool:
    """Whether kernels of the layers are quantised."""
    return any(map(is_quantised, jax.tree.leaves(params["blocks"], is_leaf=is_quantised)))
