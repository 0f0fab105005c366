"""A dropless mixture of experts in place of the MLP, with the experts split over the mesh's tensor axis.

Every token reaches all of its top-k experts: rows are sorted by expert and multiplied group by group (`ragged_dot`), so there
is no capacity limit and no token is dropped. On a mesh each device computes the rows of its own experts, and the results are
summed.

Dimension letters: B batch, T time, D model, E experts, k experts per token, F mlp of one expert, N rows (B * T).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxalign.models.adapters.lora import dense
from jaxalign.models.architecture import DecoderConfig
from jaxalign.models.layers import PRODUCT, activate, param
from jaxalign.parallel.manual import on_each_device
from jaxalign.parallel.sharding import Sharding


class Load(NamedTuple):
    """The experts' load, float32 sums over counted tokens. chosen [E]: how often each expert was chosen; probability [E]: the
    router's probabilities; tokens []: the number of tokens."""

    chosen: jax.Array
    probability: jax.Array
    tokens: jax.Array


def load_balance(load: Load) -> jax.Array:
    """float32 []: E * sum over experts of (share of tokens that chose it) * (its mean probability), pooled over all layers.

    Equals k if the load is uniform. Source: Switch Transformers, arXiv 2101.03961, eq. 4 to 6, with k choices per token.
    """
    chosen, probability = (x / jnp.maximum(load.tokens, 1.0) for x in (load.chosen, load.probability))
    return len(chosen) * jnp.sum(jax.lax.stop_gradient(chosen) * probability)


class MixtureMLP(nnx.Module):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, F, E = config.embed, config.mlp, config.experts.count
        self.experts, self.activation = config.experts, config.activation
        self.router = param(rngs, (D, E), ("embed", "norm"), D**-0.5)
        self.gate = param(rngs, (E, D, F), ("expert", "embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "embed", "mlp"), D**-0.5)
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "embed"), F**-0.5 / (2 * config.layers) ** 0.5)

    def __call__(self, x_BxTxD: jax.Array, counted_BxT: jax.Array, sharding: Sharding) -> tuple[jax.Array, Load]:
        """(mixture [B, T, D], Load over the tokens where counted is 1)."""
        logits = checkpoint_name(jnp.einsum("btd,de->bte", x_BxTxD, self.router[...].astype(x_BxTxD.dtype)), PRODUCT)
        probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        weight_BxTxk, expert_BxTxk = jax.lax.top_k(probability, self.experts.per_token)
        chosen = jnp.sum(jax.nn.one_hot(expert_BxTxk, self.experts.count) * counted_BxT[..., None, None], axis=(0, 1, 2))
        load = Load(chosen, jnp.sum(probability * counted_BxT[..., None], axis=(0, 1)), jnp.sum(counted_BxT))
        if self.experts.normalise:
            weight_BxTxk = weight_BxTxk / jnp.sum(weight_BxTxk, axis=-1, keepdims=True)
        kernels = tuple(dense(kernel[...], x_BxTxD.dtype) for kernel in (self.gate, self.up, self.down))
        routed = (x_BxTxD, weight_BxTxk.astype(x_BxTxD.dtype), expert_BxTxk)
        rows, experts = (sharding.spec(axes) for axes in (("batch", "length", None), ("expert", None, None)))
        axes = experts[0] or ()  # None if each device has all the experts, as in generation with the rules "whole".

        def local(x, weight, expert, gate, up, down):
            first = jax.lax.axis_index(axes) * gate.shape[0] if axes else jnp.int32(0)
            return jax.lax.psum(self._mix(x, weight, expert, gate, up, down, first), axes)

        split = on_each_device(sharding, local, (rows,) * 3 + (experts,) * 3, rows)
        return split(*routed, *kernels), load

    def _mix(self, x_BxTxD, weight_BxTxk, expert_BxTxk, gate, up, down, first) -> jax.Array:
        """The contribution of experts [first, first + len(gate)) to the mixture, [B, T, D]."""
        B, T, D = x_BxTxD.shape
        count, k = gate.shape[0], weight_BxTxk.shape[-1]
        expert = expert_BxTxk.reshape(-1) - first
        group = jnp.where((expert >= 0) & (expert < count), expert, count)
        order = jnp.argsort(group, stable=True)
        sizes = jnp.bincount(group, length=count + 1)[:count].astype(jnp.int32)
        rows = x_BxTxD.reshape(B * T, D)[order // k]
        hidden = activate(self.activation, jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
        out = jax.lax.ragged_dot(hidden, down, sizes) * weight_BxTxk.reshape(-1)[order][:, None]
        here = jnp.arange(len(order)) < jnp.sum(sizes)  # Rows for experts of other devices are sorted last.
        mixed = jnp.zeros((B * T, D), x_BxTxD.dtype).at[order // k].add(jnp.where(here[:, None], out, 0))
        return mixed.reshape(B, T, D)
