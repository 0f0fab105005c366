"""Bytes of a model's weights on one device, in each form that a run stores, from their shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxalign.models.adapters.lora import LINEAR
from jaxalign.models.adapters.quantised import BLOCK
from jaxalign.models.flops import multiplied
from jaxalign.models.model import Model
from jaxalign.parallel.sharding import Sharding

_TABLES = ("embedding", "unembedding")
_SUBLANES = 8
LANES = 128
"""Lanes of a TPU register. TPUs pad the last axis of many arrays to a multiple of it; shorter rows have no fused kernel."""


@dataclasses.dataclass(frozen=True)
class WeightBytes:
    """Bytes on one device, except that the first three attributes count parameters of the whole model.

    Attributes:
      count: all parameters.
      trained: trained parameters.
      matmul: parameters that multiply each token: without embedding lookup and norms, and only the active experts.
      parameters: the trained parameters, float32.
      frozen: the base under adapters, as stored.
      gradients: gradients, sharded according to config.mesh.zero.
      table_gradient: the embedding's part of `gradients`.
      optimizer: optimizer state by kind, sharded according to config.mesh.zero.
      casts: the blocks' kernels in the compute dtype, sharded as stored; 0 if they are stored in that dtype or quantised.
      table: the embedding that a lookup reads, in the compute dtype, sharded only over tensor.
      head: the LM head, in the same dtype and sharding as `table`.
      layer: the kernels of one layer, in the same dtype and sharding as `table`.
      generation: the weights that sampling reads, sharded according to config.mesh.generation.
      generation_layers: the layers' part of `generation`, with their adapters.
      moved: the part of `generation` that is resharded or cast for sampling.
      moving: the largest array of `moved`, which exists twice during the move.
      copies: arrays that a TPU stores a second time in another layout: (kernels in the compute dtype, the embedding during
        its gather), if a TPU's part of the model width is not a multiple of the 128 lanes.
      transposed: the kernels that a GPU stores a second time, of all layers. XLA gathers along the first axis, so it transposes
        those that are split over their last axis: the output of attention and the second matrix of the MLP. 0 for quantised
        kernels; if kernels are cast, `casts` is taken to include the copy.
      padded: the kernels of the keys with their heads padded to 8, as a TPU stores them a second time to decode; 0 if a device
        has 8 heads or more, or if they are quantised.
      whole: the weights that `mesh.keep_gathered` gathers: in the compute dtype, or as stored if quantised; sharded only over
        tensor and pipeline.
      learnt: the trained parameters in the compute dtype, sharded only over tensor, as gradients are before the reduce-scatter.
    """

    count: int
    trained: int
    matmul: int
    parameters: float
    frozen: float
    gradients: float
    table_gradient: float
    optimizer: dict[str, float]
    casts: float
    table: float
    head: float
    layer: float
    generation: float
    generation_layers: float
    moved: float
    moving: float
    copies: tuple[float, float]
    transposed: float
    padded: float
    whole: float
    learnt: float

    def on(self, platform: str) -> WeightBytes:
        """The bytes with the `copies` that devices of a platform make: "gpu" or "tpu"."""
        return dataclasses.replace(self, copies=(self.transposed, 0.0)) if platform == "gpu" else self


def split_ways(axes: Iterable[str], mesh: Mapping[str, int]) -> int:
    """The number of devices along mesh axes. mesh: sizes by axis."""
    return math.prod(mesh[axis] for axis in axes)


@functools.lru_cache(maxsize=4096)
def measure(model: Model, stored: str, frozen: bool = False) -> WeightBytes:
    """Measures the weights of a model on its mesh, which may be an AbstractMesh.

    Args:
      model: the model.
      stored: the storage format of the base under adapters (`config.lora.base`) or, with `frozen`, of all weights.
      frozen: whether the model has no adapters and is never trained, such as a judge.
    """
    sharding, config = model.sharding, model.config
    # Weights in use are gathered over all axes except tensor.
    in_use = dataclasses.replace(sharding, phase="generation", generation_rules="tensor")
    own, base = _Tree.of(model.abstract(), model.axes()), _Tree.of(model.base.abstract(), model.base.axes())
    compute = np.dtype(config.compute_dtype).itemsize
    adapted = model.lora is not None
    if not adapted:  # A scalar head takes the LM head's place.
        base = own
    kernels = base.only(lambda path: path[0] == "blocks" and path[1:] in LINEAR)
    held = stored if adapted or frozen else "float32"
    # Sampling reads quantised kernels as they are stored; the tables of a quantised model are in bfloat16.
    stays = np.dtype("float32" if held == "float32" else "bfloat16").itemsize == compute
    cast = held in ("float32", "bfloat16") and not stays  # Quantisation builds an array layer by layer.
    table = base.only(lambda path: path[0] == "embedding").bytes(in_use, lambda *_: compute)
    untied = base.only(lambda path: path[0] == "unembedding").bytes(in_use, lambda *_: compute)
    layer = kernels.bytes(in_use, lambda *_: compute) / config.layers

    def sampled_size(path: tuple, shape: tuple) -> float:
        """Bytes of a number in sampling, which reads quantised kernels as they are stored."""
        kernel = path[0] == "blocks" and path[1:] in LINEAR
        return _stored(held, path, shape) if kernel and held in ("int8", "nf4") else compute

    sampled = base.bytes(sharding.generation, sampled_size)
    layers = base.only(lambda path: path[0] == "blocks").bytes(sharding.generation, sampled_size)
    adapters = own.only(lambda path: path[0] == "adapters").bytes(sharding.generation, lambda *_: 4)
    as_stored = stays and all(
        sharding.named(axes).shard_shape(shape) == sharding.generation.named(axes).shard_shape(shape)
        for _, shape, axes in base.rows
    )
    return WeightBytes(
        count=base.count + (own.count if adapted else 0),
        trained=own.count,
        matmul=multiplied(model),
        parameters=own.bytes(sharding, lambda path, shape: _stored(held, path, shape) if frozen else 4),
        frozen=base.bytes(sharding, lambda path, shape: _stored(held, path, shape)) if adapted else 0.0,
        gradients=own.bytes(sharding.gradients, lambda *_: 4),
        table_gradient=own.only(lambda path: path[0] == "embedding").bytes(sharding.gradients, lambda *_: 4),
        optimizer={kind: own.bytes(sharding.optimizer, functools.partial(_moments, kind)) for kind in OPTIMIZERS},
        casts=0.0 if not cast else kernels.bytes(sharding, lambda *_: compute),
        table=table,
        head=untied or table,
        layer=layer,
        generation=sampled + (own.bytes(sharding.generation, lambda *_: 4) if adapted else 0.0),
        generation_layers=layers + adapters,
        moved=0.0 if as_stored else sampled,
        moving=0.0 if as_stored else max(base.sizes(sharding.generation, sampled_size), default=0.0),
        copies=_copies(model, base, table, compute),
        transposed=_transposed(kernels, sharding, compute) if stays and held in ("float32", "bfloat16") else 0.0,
        padded=_padded(base, sharding, compute) if held in ("float32", "bfloat16") else 0.0,
        whole=base.only(lambda path: path[-1] != "score").bytes(sharding.gathered, sampled_size),
        learnt=own.bytes(in_use, lambda *_: compute),
    )


def _copies(model: Model, base: _Tree, table: float, compute: int) -> tuple[float, float]:
    """See `WeightBytes.copies`; zeros if the width is not split, or each part of it fills whole lanes."""
    ways = split_ways(model.sharding.rules["embed"], model.sharding.mesh.shape)
    if ways == 1 or model.config.embed // ways % LANES == 0:
        return 0.0, 0.0
    return base.only(lambda path: path[:2] == ("blocks", "attention") and path[1:] in LINEAR).bytes(
        model.sharding, lambda *_: compute
    ), table


def _padded(base: _Tree, sharding: Sharding, compute: int) -> float:
    keys = base.only(lambda path: path == ("blocks", "attention", "key"))
    heads = [sharding.generation.named(axes).shard_shape(shape)[-2] for _, shape, axes in keys.rows]
    if not heads or heads[0] >= _SUBLANES:
        return 0.0
    return keys.bytes(sharding.generation, lambda *_: compute) * _SUBLANES / heads[0]


def _transposed(kernels: _Tree, sharding: Sharding, compute: int) -> float:
    last = _Tree([row for row in kernels.rows if row[2][-1] == "embed"])
    split = split_ways(sharding.rules["embed"], sharding.mesh.shape) > 1
    return last.bytes(sharding, lambda *_: compute) if split else 0.0


OPTIMIZERS = ("adamw", "lion", "adafactor", "muon", "sophia")
"""The values of an optimizer's `kind` in the config."""
FACTORED = 128
"""optax factors an array if its two largest axes have at least this size."""


def _moments(kind: str, path: tuple, shape: tuple) -> float:
    """Bytes of float32 optimizer state per parameter."""
    if kind == "lion":
        return 4
    if kind == "muon":  # One momentum for kernels, Adam's two moments for other parameters.
        kernel = (path[0] == "blocks" and path[1:] in LINEAR) or (path[0] == "adapters" and path[-1] in ("a", "b"))
        return 4 if kernel else 8
    if kind == "adafactor":  # Sums of squares along the two largest axes of each layer's matrix.
        large = sorted(shape[1:] if path[0] in ("blocks", "adapters") else shape)[-2:]
        if len(large) < 2 or large[0] < FACTORED:  # Smaller arrays have the unfactored squares.
            return 4
        return 4 * (large[0] + large[1]) / (large[0] * large[1])
    return 8


@dataclasses.dataclass(frozen=True)
class _Tree:
    """(path, shape, logical axes) of each of a pytree's arrays."""

    rows: list[tuple[tuple, tuple, tuple]]

    @classmethod
    def of(cls, shapes: Any, axes: Any) -> _Tree:
        leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
        names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
        paths = (tuple(key.key for key in path) for path, _ in leaves)
        return cls([(path, leaf.shape, name) for path, (_, leaf), name in zip(paths, leaves, names, strict=True)])

    def only(self, wanted: Callable[[tuple], bool]) -> _Tree:
        return _Tree([row for row in self.rows if wanted(row[0])])

    @property
    def count(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.rows)

    def bytes(self, sharding: Sharding, size: Callable[[tuple, tuple], float]) -> float:
        """Bytes of all arrays on one device. size(path, shape) is the bytes of one number."""
        return sum(self.sizes(sharding, size))

    def sizes(self, sharding: Sharding, size: Callable[[tuple, tuple], float]) -> list[float]:
        """Bytes of each array on one device."""
        return [math.prod(sharding.named(axes).shard_shape(shape)) * size(path, shape) for path, shape, axes in self.rows]


def _stored(kind: str, path: tuple, shape: tuple[int, ...]) -> float:
    """Bytes per number of the frozen base (`models/adapters/quantised.py`), including its share of the scales."""
    kernel = path[0] == "blocks" and path[1:] in LINEAR
    if kind == "float32" or not (kernel or path[0] in _TABLES):
        return 4
    if kind == "bfloat16" or not kernel:
        return 2
    first, inputs = (2 if path[1] == "mlp" and len(shape) == 4 else 1), LINEAR[path[1:]][0]  # Experts add an axis.
    if kind == "nf4":
        return 0.5 + 4 / math.gcd(BLOCK, shape[first + inputs - 1])
    return 1 + 4 / math.prod(shape[first : first + inputs])
