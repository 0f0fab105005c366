"""Whether decoding copies the layers out of their stacks, the arrays with all layers along the first axis.

XLA often stores a slice of a stack as an array of its own, and then copies every layer in every step. Layers that are copied
once before a loop of steps need their memory a second time.
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
      False if decoding scans the layers; otherwise true on CPUs, and on GPUs as in `copied_on_gpus`.
    """
    if not model.layered or model.sharding.platform == "cpu":
        return model.layered
    return copied_on_gpus(model.sharding, layer_bytes(model, params), usable_memory(model.sharding.mesh.devices))


def copied_on_gpus(sharding: Sharding, size: float, memory: float | None) -> bool:
    """Whether unrolled layers are copied on GPUs: if the copy needs at most `SHARE` of the memory, and sampling does not gather
    the layers while it reads them.

    Args:
      sharding: the mesh and the rules of sampling.
      size: bytes of the layers on a device.
      memory: bytes that programs can use; None if unknown, and then nothing is copied. It is rounded down to GiB: all processes
        must decide alike, and devices of one kind can report slightly different figures.
    """
    gathered = any(sharding.mesh.shape[axis] > 1 for name in ("layers", "embed") for axis in sharding.rules[name])
    return not gathered and memory is not None and size <= SHARE * (int(memory) >> 30 << 30)


def layer_bytes(model: Model, params: Any) -> float:
    """The bytes on a device of the layers of `params` and their adapters."""
    return sum(
        _share_of_a_device(own, name) * sum(stored_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(params[name]))
        for own, name in ((model.base, "blocks"), (model, "adapters")) if name in params
    )


@functools.lru_cache(maxsize=64)
def _share_of_a_device(model: Model, name: str) -> float:
    """The share of these parameters of the layers that a device holds."""
    leaves = jax.tree.leaves(model.abstract()[name])
    here = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    return here / sum(leaf.size for leaf in leaves)


def has_quantised_layers(params: Any) -> bool:
    """Whether kernels of the layers are quantised."""
    return any(map(is_quantised, jax.tree.leaves(params["blocks"], is_leaf=is_quantised)))
