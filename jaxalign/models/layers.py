"""The parts of a decoder layer in Flax NNX: norms, rotary positions, attention projections, the MLP.

Dimension letters: B batch, T time, D model, H query heads, K key/value heads, h head dim, F mlp.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxalign.models.adapters.lora import Adapters, dense, is_quantised
from jaxalign.models.architecture import DecoderConfig
from jaxalign.parallel.sharding import Sharding

KEPT = "kept"  # The checkpoint name of arrays that `keep` marks.
PRODUCT = "product"  # The checkpoint name of products with weights, with the output of adapters; those of experts have none.
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Turn(NamedTuple):
    """The rotation by rotary positions: cosine and sine, float32 [B, T, 1, n]. Computed once for all layers, since computing
    them takes longer than reading them."""

    cosine: jax.Array
    sine: jax.Array


def turn(positions_BxT: jax.Array, frequency: jax.Array, magnitude: float = 1.0) -> Turn:
    """The `Turn` at these positions, times `magnitude`. frequency float32 [n]: radians per position for each pair of
    dimensions."""
    angle = positions_BxT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    by = Turn(jnp.cos(angle), jnp.sin(angle))
    return by if magnitude == 1 else Turn(by.cosine * magnitude, by.sine * magnitude)


def rotate(x_BxTxHxh: jax.Array, by: Turn) -> jax.Array:
    """Rotary position embedding, halves convention (RoFormer, arXiv 2104.09864; layout of Hugging Face Llama).

    Rotates the first 2n of a head's dimensions, pairing dimension i with i + n.
    """
    turned = 2 * by.sine.shape[-1]
    first, second = jnp.split(x_BxTxHxh[..., :turned].astype(jnp.float32), 2, axis=-1)
    parts = [first * by.cosine - second * by.sine, second * by.cosine + first * by.sine]
    rotated = jnp.concatenate(parts, axis=-1).astype(x_BxTxHxh.dtype)
    return rotated if turned == x_BxTxHxh.shape[-1] else jnp.concatenate([rotated, x_BxTxHxh[..., turned:]], axis=-1)


def keep(x: jax.Array) -> jax.Array:
    """Returns x, marked as one of the few results of a layer that are too expensive to recompute in the backward pass."""
    return checkpoint_name(x, KEPT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """einsum(equation, x, kernel), where the gradient of the kernel transposes the narrower of x and the cotangent.

    On a CPU the transposition is fused into the loop that computes the operand. By default JAX transposes the cotangent. For
    an MLP's first kernels that is the F-wide derivative of an activation, and computing it transposed takes longer than the
    matrix product itself.
    """
    return jnp.einsum(equation, x, kernel)


def _linear(equation: str, x, kernel):
    # Frozen kernels need no gradient, so no residual is kept for them.
    kept = x.value if kernel.perturbed else None, kernel.value if x.perturbed else None
    return jnp.einsum(equation, x.value, kernel.value), kept


def _linear_gradients(equation: str, kept, g):
    if isinstance(g, SymbolicZero):
        return None, None
    (left, right), out = equation.split("->")[0].split(","), equation.split("->")[1]
    x, kernel = kept
    of_x = None if kernel is None else jnp.einsum(f"{out},{right}->{left}", g, kernel)
    if x is None:
        return of_x, None
    into, produced = ("".join(axis for axis in right if axis in axes) for axes in (left, out))
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(out, g.shape, strict=True))
    if math.prod(sizes[axis] for axis in into) <= math.prod(sizes[axis] for axis in produced):
        return of_x, jnp.einsum(f"{left},{out}->{right}", x, g)
    turned = jnp.einsum(f"{out},{left}->{produced}{into}", g, x)
    return of_x, turned.transpose([(produced + into).index(axis) for axis in right])


linear.defvjp(_linear, _linear_gradients, symbolic_zeros=True)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118); x if cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def times(x: jax.Array, factor: float) -> jax.Array:
    """x * factor, in the dtype of x; x itself if the factor is 1."""
    return x if factor == 1 else (x * jnp.float32(factor)).astype(x.dtype)


def activate(name: str, x: jax.Array) -> jax.Array:
    """Applies the named activation function; the result has the dtype of x. float16 is computed in float32: the cube in
    gelu_tanh would overflow beyond 40."""
    return _ACTIVATIONS[name](x.astype(jnp.float32)).astype(x.dtype) if x.dtype == jnp.float16 else _ACTIVATIONS[name](x)


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], std: float) -> nnx.Param:
    """A normally distributed parameter with its logical axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


class Norm(nnx.Module):
    """Normalises the last axes in float32: RMSNorm with scale w ("rms") or 1 + w ("rms_plus_one"), or LayerNorm ("layer").

    sizes, names: the sizes of the normalised axes, by default the width of the residual stream, and their logical names.
    """

    def __init__(self, config: DecoderConfig, sizes: tuple[int, ...] = (), names: tuple[str, ...] = ("norm",)):
        sizes = sizes or (config.embed,)
        zero_is_identity = config.norm == "rms_plus_one"
        self.scale = nnx.Param((jnp.zeros if zero_is_identity else jnp.ones)(sizes, jnp.float32), axes=names)
        if config.norm == "layer":
            self.bias = nnx.Param(jnp.zeros(sizes, jnp.float32), axes=names)
        self.eps, self.kind, self.axes = config.norm_eps, config.norm, tuple(range(-len(sizes), 0))

    def __call__(self, x: jax.Array) -> jax.Array:
        others = range(x.ndim - len(self.axes))
        x32, scale = x.astype(jnp.float32), jnp.expand_dims(self.scale[...], others)
        if self.kind == "layer":
            x32 = x32 - jnp.mean(x32, axis=self.axes, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=self.axes, keepdims=True) + self.eps)
        if self.kind == "layer":
            return (normed * scale + jnp.expand_dims(self.bias[...], others)).astype(x.dtype)
        return (normed * (1 + scale if self.kind == "rms_plus_one" else scale)).astype(x.dtype)


class Linear(nnx.Module):
    """A module with named kernels and optional biases, which `project` applies."""

    def project(
        self, name: str, x: jax.Array, equation: str, adapters: Adapters, adapted: jax.Array | None = None
    ) -> jax.Array:
        """einsum(equation, x, kernel `name`), plus its adapter and its bias if it has them, in the dtype of x.

        adapted: x for the adapter if several kernels multiply x (`Adapters.inputs`).
        """
        kernel = getattr(self, name)[...]

        def product(x, kernel):
            return linear(equation, x, dense(kernel, x.dtype))

        if is_quantised(kernel) or (adapters.lora is not None and kernel.dtype != x.dtype):
            # Recompute the dense kernel in the backward pass: otherwise a scan would save it for all layers.
            product = jax.checkpoint(product, prevent_cse=False)
        y = adapters.apply(name, x if adapted is None else adapted, product(x, kernel))
        y = adapters.rescale(name, kernel, checkpoint_name(y, PRODUCT))
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + jnp.expand_dims(bias[...].astype(x.dtype), range(y.ndim - bias.ndim))


class Attention(Linear):
    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, H, K, h = config.embed, config.heads, config.kv_heads, config.head_dim
        self.config = config
        self.query = param(rngs, (D, H, h), ("embed", "heads", "head_dim"), D**-0.5)
        self.key = param(rngs, (D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.value = param(rngs, (D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.out = param(rngs, (H, h, D), ("heads", "head_dim", "embed"), (H * h) ** -0.5 / (2 * config.layers) ** 0.5)
        if config.qkv_bias:
            self.query_bias = nnx.Param(jnp.zeros((H, h), jnp.float32), axes=("heads", "head_dim"))
            self.key_bias = nnx.Param(jnp.zeros((K, h), jnp.float32), axes=("kv_heads", "head_dim"))
            self.value_bias = nnx.Param(jnp.zeros((K, h), jnp.float32), axes=("kv_heads", "head_dim"))
        if config.out_bias:
            self.out_bias = nnx.Param(jnp.zeros((D,), jnp.float32), axes=("norm",))
        if config.head_norm:
            if config.joint_head_norm:
                self.query_norm = Norm(config, (H, h), ("heads", "head_dim"))
                self.key_norm = Norm(config, (K, h), ("kv_heads", "head_dim"))
            else:
                self.query_norm, self.key_norm = Norm(config, (h,)), Norm(config, (h,))

    def heads(self, x_BxTxD, by: Turn, adapters: Adapters, sharding: Sharding):
        """Rotated queries [B, T, H, h] and keys, and values [B, T, K, h]."""
        x, adapted = adapters.inputs(x_BxTxD)
        q, k, v = (self.project(name, x, "btd,dnh->btnh", adapters, adapted) for name in ("query", "key", "value"))
        q = sharding.constrain(q, ("batch", "length", "heads", "head_dim"))
        k = sharding.constrain(k, ("batch", "length", "kv_heads", "head_dim"))
        v = sharding.constrain(v, ("batch", "length", "kv_heads", "head_dim"))
        if self.config.head_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return keep(rotate(q, by)), keep(rotate(k, by)), keep(v)


class MLP(Linear):
    """down(act(gate x) * up x), or down(act(up x)) if not gated."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        D, F = config.embed, config.mlp
        self.gated, self.activation = config.gated, config.activation
        if config.gated:
            self.gate = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down = param(rngs, (F, D), ("mlp", "embed"), F**-0.5 / (2 * config.layers) ** 0.5)
        if config.mlp_bias:
            if config.gated:
                self.gate_bias = nnx.Param(jnp.zeros((F,), jnp.float32), axes=("mlp",))
            self.up_bias = nnx.Param(jnp.zeros((F,), jnp.float32), axes=("mlp",))
            self.down_bias = nnx.Param(jnp.zeros((D,), jnp.float32), axes=("norm",))

    def __call__(self, x_BxTxD: jax.Array, adapters: Adapters, sharding: Sharding) -> jax.Array:
        x, adapted = adapters.inputs(x_BxTxD)
        up = keep(self.project("up", x, "btd,df->btf", adapters, adapted))
        if self.gated:
            hidden = activate(self.activation, keep(self.project("gate", x, "btd,df->btf", adapters, adapted))) * up
        else:
            hidden = activate(self.activation, up)
        return self.project("down", sharding.constrain(hidden, ("batch", "length", "mlp")), "btf,fd->btd", adapters)
