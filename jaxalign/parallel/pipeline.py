"""Pipeline parallelism: the mesh axis `pipeline` splits the layers into stages, and micro-batches pass from stage to stage.

With S stages, M micro-batches and R repeats, a stage computes R blocks of layers: stage s the blocks s, S+s, 2S+s ... With
R = 1 this is the plain schedule (GPipe, arXiv 1811.06965), otherwise the interleaved one (Megatron-LM, arXiv 2104.04473,
section 2.2). At step t stage s computes item t - s of its R*M items of work, ordered by repeat, then by micro-batch, so a pass
takes R*M + S - 1 steps and a stage is idle for (S-1) / (R*M + S-1) of it. The backward pass is the transpose of the forward
pass and has the same idle share.

Each stage stores L/S consecutive layers; with R > 1 parameters are exchanged once per pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.errors import UserError
from jaxalign.parallel.sharding import Sharding

PIPELINE = "pipeline"


def is_pipelined(sharding: Sharding) -> bool:
    """Returns whether layers run as pipeline stages."""
    return sharding.phase == "training" and sharding.mesh.shape[PIPELINE] > 1


def bubble(stages: int, micro_batches: int, repeats: int = 1) -> float:
    """Returns the share of a pass in which a stage is idle."""
    return (stages - 1) / (repeats * micro_batches + stages - 1)


def micro_batches(sharding: Sharding, rows: int) -> int:
    """Returns the number of micro-batches for `rows` rows: `pipeline_micro_batches`, or fewer for few rows."""
    return math.gcd(rows // sharding.batch_size, sharding.pipeline_micro_batches)


def run_stages(sharding: Sharding, stage: Callable, layers: Any, x: jax.Array, rows: Any) -> tuple[jax.Array, Any]:
    """Applies all layers to x [B, ...]. Returns the result and the sum over the layers of the stages' second outputs.

    stage(layers of one block, x [B/M, ...], rows of those) -> (x, sums or None). layers: leaves [L, ...]; rows: leaves
    [B, ...]. If S divides M, the result's rows are also split over `pipeline`, so that later work is not repeated S times.

    Raises:
        UserError: R*S does not divide the layers, or there are fewer micro-batches than stages and R > 1.
    """
    S, R, M = sharding.mesh.shape[PIPELINE], sharding.pipeline_repeats, micro_batches(sharding, len(x))
    L = len(jax.tree.leaves(layers)[0])
    if L % (S * R):
        raise UserError(f"config.mesh.pipeline ({S}) x pipeline_repeats ({R}) = {S * R}; it must divide the layers ({L})")
    if R > 1 and M < S:
        raise UserError(f"config.mesh.pipeline_repeats is {R}; it needs as many micro-batches as stages ({S}), but {len(x)} "
                        f"rows make {M}: give more rows, or set it to 1")
    parts, rows = _deal(sharding, x, M), jax.tree.map(lambda leaf: _deal(sharding, leaf, M), rows)
    split = M % S == 0

    def local(layers, parts, rows):
        here = jax.lax.axis_index(PIPELINE)

        def step(carry, t):
            kept, arrived, sums = carry
            kept = _keep(kept, arrived, (t - S) % M, (here == 0) & (t >= S))
            work = t - here
            useful, part, repeat = (work >= 0) & (work < R * M), work % M, jnp.clip(work // M, 0, R - 1)
            given = jnp.where(here == 0, _at(kept, t % M), arrived)
            block = jax.tree.map(lambda leaf: _at(leaf[0], repeat), layers)
            out, own = stage(block, given, jax.tree.map(lambda leaf: _at(leaf, part), rows))
            sums = jax.tree.map(lambda a, b: a + jnp.where(useful, b, 0), sums, own)
            arrived = jax.lax.ppermute(out, PIPELINE, [(i, (i + 1) % S) for i in range(S)])
            return (kept, arrived, sums), None

        first = jax.tree.map(lambda leaf: leaf[0, 0], layers), parts[0], jax.tree.map(lambda leaf: leaf[0], rows)
        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(stage, *first)[1])
        start = (parts, jnp.zeros_like(parts[0]), none)
        (kept, arrived, sums), _ = jax.lax.scan(step, start, jnp.arange(R * M + S - 1))
        kept = _keep(kept, arrived, M - 1, here == 0)
        done = jnp.where(here == 0, kept, 0)
        done = jax.lax.psum_scatter(done, PIPELINE, tiled=True) if split else jax.lax.psum(done, PIPELINE)
        return done, jax.lax.psum(sums, PIPELINE)

    stages, whole = PartitionSpec(PIPELINE), PartitionSpec()
    piped = jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(stages, whole, whole), out_specs=(stages if split else whole, whole),
        axis_names={PIPELINE}, check_vma=False,
    )
    done, sums = piped(_by_stage(sharding, layers, S, R), parts, rows)
    return _collect(sharding, done), sums


def _at(x: jax.Array, index) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _keep(kept, part, index, wanted):
    """Writes `part` at `index` of `kept` if `wanted`; otherwise leaves `kept` unchanged."""
    return jax.lax.dynamic_update_index_in_dim(kept, jnp.where(wanted, part, _at(kept, index)), index, 0)


def _by_stage(sharding: Sharding, layers, S: int, R: int):
    """Reshapes leaves to [S, R, L / (S R), ...], split over the stages."""

    def arrange(leaf):
        blocks = leaf.reshape(R, S, -1, *leaf.shape[1:]).swapaxes(0, 1)
        spec = PartitionSpec(PIPELINE, *(PartitionSpec.UNCONSTRAINED,) * (blocks.ndim - 1))
        return jax.lax.with_sharding_constraint(blocks, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(arrange, layers)


def _deal(sharding: Sharding, x: jax.Array, M: int) -> jax.Array:
    """Reshapes [B, ...] to [M, B/M, ...]; each device keeps its rows."""
    D = sharding.batch_size
    return x.reshape(D, M, -1, *x.shape[1:]).swapaxes(0, 1).reshape(M, len(x) // M, *x.shape[1:])


def _collect(sharding: Sharding, parts: jax.Array) -> jax.Array:
    """The inverse of `_deal`."""
    M, D = len(parts), sharding.batch_size
    return parts.reshape(M, D, -1, *parts.shape[2:]).swapaxes(0, 1).reshape(M * parts.shape[1], *parts.shape[2:])
