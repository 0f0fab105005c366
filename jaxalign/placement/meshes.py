"""Sizes of mesh axes for a number of devices: which divide a model's heads and batch, and which is nearest to a wanted mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxalign.errors import UserError
from jaxalign.placement.names import require_known

AXES = ("pipeline", "data", "fsdp", "context", "tensor")
"""The axes of every mesh, outer to inner, as in `jaxalign.parallel.mesh`."""
INFERENCE_AXES = ("data", "tensor")
"""The axes for inference. Under fsdp, weights would be gathered for every token that is decoded."""
_COSTS = {"data": 1.0, "fsdp": 1.1, "pipeline": 1.2, "context": 1.2, "tensor": 1.3}
"""The cost of changing an axis by a factor of 2: change the axis first that splits the least of a model."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of a model and its batch that a mesh must divide; 0 if unknown.

    Attributes:
      heads, kv_heads, mlp, vocab: query heads, key/value heads, the width of an MLP (or the number of experts) and the rows of
        the vocabulary's tables, which tensor divides.
      rows: rows of a batch, which data x fsdp divides.
      embed: the width, which fsdp divides.
      layers: the layers, which pipeline divides.
    """

    heads: int = 0
    kv_heads: int = 0
    rows: int = 0
    mlp: int = 0
    vocab: int = 0
    embed: int = 0
    layers: int = 0

    def problem(self, mesh: Mapping[str, int]) -> str:
        """Completes the sentence "the mesh ..." if it does not divide the sizes; else empty."""
        parts = mesh["data"] * mesh["fsdp"]
        for axis, size, noun in (
            ("tensor", self.heads, "heads"), ("tensor", self.kv_heads, "key/value heads"), ("tensor", self.mlp, "MLP columns"),
            ("tensor", self.vocab, "rows of the vocabulary's tables"), ("fsdp", self.embed, "columns of the embeddings"),
            ("pipeline", self.layers, "layers"),
        ):
            if size % mesh[axis]:
                return f"cannot split {size} {noun} evenly over {axis}={mesh[axis]}"
        return f"cannot split a batch of {self.rows} rows evenly over data x fsdp = {parts}" if self.rows % parts else ""


def joint(limits: Iterable[Limits]) -> Limits:
    """The limits of a mesh that several models share."""
    every = tuple(limits)
    return Limits(*(math.gcd(*(getattr(one, size.name) for one in every)) for size in dataclasses.fields(Limits)))


def complete(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all axes; those that are not given are 1.

    Raises:
      UserError: an axis does not exist, or its size is not a whole number above 0.
    """
    for axis, size in sizes.items():
        require_known("mesh axis", axis, AXES)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"mesh axis {axis} has size {size}; it must be a whole number of at least 1")
    return {axis: sizes.get(axis, 1) for axis in AXES}


def text(mesh: Mapping[str, int]) -> str:
    """A mesh as in a placement entry, without axes of size 1: "fsdp=4,tensor=2"."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "data=1"


def size(mesh: Mapping[str, int]) -> int:
    """The number of devices of a mesh."""
    return math.prod(mesh.values())


@functools.lru_cache(maxsize=256)
def _factorizations(count: int, factors: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write `count` as an ordered product of `factors` numbers."""
    if factors == 1:
        return ((count,),)
    return tuple((first, *rest) for first in range(1, count + 1) if count % first == 0
                 for rest in _factorizations(count // first, factors - 1))


def meshes(count: int, axes: Sequence[str] = AXES) -> Iterator[dict[str, int]]:
    """Every mesh of `count` devices with these axes; all other axes are 1."""
    for sizes in _factorizations(count, len(axes)):
        yield complete(dict(zip(axes, sizes, strict=True)))


def nearest(
    wanted: Mapping[str, int], count: int, limits: Limits, axes: Sequence[str] = AXES, within: int = 0
) -> dict[str, int] | None:
    """The mesh of `count` devices that is nearest to a wanted one and divides the limits; None if there is none.

    Args:
      wanted: a mesh with all axes, possibly of another number of devices. Of `axes`, data is preferred to grow.
      count: the number of devices.
      limits: the sizes to divide.
      axes: the axes that may be above 1.
      within: a number that tensor must divide, so that it stays within a host; 0: any.
    """
    possible = (mesh for mesh in meshes(count, axes) if within % mesh["tensor"] == 0 and not limits.problem(mesh))
    return min(possible, key=lambda mesh: sum(cost * abs(math.log2(mesh[axis] / wanted[axis]))
                                              for axis, cost in _COSTS.items() if axis in axes), default=None)
