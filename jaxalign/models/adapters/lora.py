"""Low-rank adapters on a frozen decoder: LoRA (arXiv 2106.09685), rsLoRA (2312.03732) and DoRA (2402.09353).

An adapted model has two weight trees: the frozen weights of the base, and the trained weights: "adapters", stacked over layers
like the blocks they belong to, and "score" if there is a scalar head. `join` combines them for a forward pass; without
"adapters" the same model computes the outputs of its base. A policy, its reference and its critic therefore share one copy
of the base.

Dimension letters: D model, H query heads, h head dim, F mlp, L layers, r rank.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError

# The linear layers of a block: the number of leading input axes of the kernel, and the name in Hugging Face models.
LINEAR: dict[tuple[str, str], tuple[int, str]] = {
    ("attention", "query"): (1, "q_proj"),
    ("attention", "key"): (1, "k_proj"),
    ("attention", "value"): (1, "v_proj"),
    ("attention", "out"): (2, "o_proj"),
    ("mlp", "gate"): (1, "gate_proj"),
    ("mlp", "up"): (1, "up_proj"),
    ("mlp", "down"): (1, "down_proj"),
}
TRAINED = ("adapters", "score")
"""The top-level names that an adapted model trains; all others are frozen."""


@dataclasses.dataclass(frozen=True)
class LoraAdapters:
    """Adapters with the same settings on all linear layers that match a pattern.

    targets: shell patterns over "attention.query" ... "mlp.down", or over "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj" and "down_proj".
    rank_stabilised: the adapter's output is scaled by alpha / sqrt(rank) instead of alpha / rank (rsLoRA).
    dora: the magnitude of each output's weight vector is trained separately from its direction (DoRA).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rank_stabilised: bool = False
    dora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)

    def adapted(self, blocks: dict[str, Any]) -> list[tuple[str, str]]:
        """(part, name) of the linear layers that get an adapter. blocks: the decoder's tree under "blocks".

        Raises UserError for a pattern that matches none. Experts' kernels never have adapters.
        """
        present = [key for key in LINEAR if "router" not in blocks[key[0]] and key[1] in blocks[key[0]]]
        chosen = set()
        for pattern in self.targets:
            names = {key: (f"{key[0]}.{key[1]}", LINEAR[key][1]) for key in present}
            matched = {key for key, both in names.items() if any(fnmatch.fnmatchcase(name, pattern) for name in both)}
            if not matched:
                raise UserError(f"config.lora.targets contains {pattern!r}, which matches no linear layer of this model; it "
                                f"has {', '.join(names[key][0] for key in present)}")
            chosen |= matched
        return [key for key in present if key in chosen]


def join(frozen: dict[str, Any] | None, params: dict[str, Any]) -> dict[str, Any]:
    """All parameters for a forward pass: the trained ones override frozen ones. frozen None: all are trained."""
    return params if frozen is None else {**frozen, **params}


def strip_frozen(frozen: dict[str, Any] | None, params: dict[str, Any] | None) -> dict[str, Any] | None:
    """The inverse of `join`: parameters without the arrays that belong to the frozen ones.

    Programs that run several models on one base receive the base once: a TPU counts an argument's memory each time it is passed
    to a compiled program.
    """
    if frozen is None or params is None:
        return params
    kept = {id(leaf) for leaf in jax.tree.leaves(frozen)}
    return {name: x for name, x in params.items() if not all(id(leaf) in kept for leaf in jax.tree.leaves(x))}


def trained(params: dict[str, Any]) -> dict[str, Any]:
    """The trained part of an adapted model's parameters."""
    return {name: value for name, value in params.items() if name in TRAINED}


def adapter_axes(lora: LoraAdapters, axes: dict[str, Any], rank: str | int = "rank") -> dict[str, Any]:
    """Logical axes of "adapters". axes: those of the base's "blocks", including the leading "layers". For shapes in place of
    axes, with the number `rank`, the result is the adapters' shapes."""
    tree: dict[str, Any] = {}
    for part, name in lora.adapted(axes):
        layers, *inner = axes[part][name]
        count = LINEAR[part, name][0]
        place = tree.setdefault(part, {}).setdefault(name, {})
        place["a"] = (layers, *inner[:count], rank)
        place["b"] = (layers, rank, *inner[count:])
        if lora.dora:
            place["magnitude"] = (layers, *inner[count:])
    return tree


def adapter_shapes(lora: LoraAdapters, blocks: dict[str, Any]) -> dict[str, Any]:
    """float32 ShapeDtypeStructs of "adapters": "a" [L, in..., r], "b" [L, r, out...] and, for DoRA, "magnitude" [L, out...].

    blocks: shapes (anything with .shape) of the base's "blocks".
    """
    axes = jax.tree.map(lambda leaf: leaf.shape, blocks, is_leaf=is_quantised)
    shapes = adapter_axes(lora, axes, lora.rank)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def init_adapters(lora: LoraAdapters, blocks: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Adapters that do not change the outputs yet: a uniform within +-1 / sqrt(inputs), b 0, magnitude the weights' norm."""
    tree = adapter_shapes(lora, blocks)
    for number, (part, name) in enumerate(lora.adapted(blocks)):
        place = tree[part][name]
        count, kernel = LINEAR[part, name][0], blocks[part][name]
        bound = math.prod(place["a"].shape[1:-1]) ** -0.5
        a = jax.random.uniform(jax.random.fold_in(key, number), place["a"].shape, jnp.float32, -bound, bound)
        fresh = {"a": a, "b": jnp.zeros(place["b"].shape, jnp.float32)}
        if lora.dora:
            fresh["magnitude"] = jnp.sqrt(
                jnp.sum(jnp.square(dense(kernel, jnp.float32)), axis=tuple(range(1, 1 + count)))
            )
        tree[part][name] = fresh
    return tree


def is_quantised(leaf: Any) -> bool:
    """Whether a leaf of the parameters is a QArray of `quantised.py`."""
    return hasattr(leaf, "qvalue")


def dense(kernel: Any, dtype) -> jax.Array:
    """A kernel as an array of that dtype, dequantised if necessary."""
    if not is_quantised(kernel):
        return kernel.astype(dtype)
    import qwix  # The import takes seconds, and few runs need it.

    return qwix.dequantize(kernel.astype(jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of all layers, of one layer, or of a part of it, for a forward pass. tree may be empty."""

    lora: LoraAdapters | None
    tree: dict[str, Any]

    def part(self, name: str) -> Adapters:
        return Adapters(self.lora, self.tree.get(name, {}))

    def prepared(self, blocks: dict[str, Any], dtype) -> Adapters:
        """The adapters of all layers for a loop with constant weights. The matrices have the dtype in which `apply` multiplies
        them. In place of DoRA's magnitudes are their ratios to the norms of the adapted kernels. The result can be applied, and
        not prepared again.

        blocks: the stacked kernels, by part and name.
        """

        def prepare(kernel: Any, own: dict[str, jax.Array]) -> dict[str, jax.Array]:
            fixed = {name: own[name].astype(dtype) for name in ("a", "b")}
            if self.lora.dora:
                fixed["ratio"] = jax.lax.map(lambda one: dora_ratio(adapted_kernel(self.lora, *one), one[1]), (kernel, own))
            return fixed

        return Adapters(self.lora, {
            part: {name: prepare(blocks[part][name], own) for name, own in leaves.items()} for part, leaves in self.tree.items()
        })

    def inputs(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x [..., in...] twice: for several kernels, and for their adapters.

        The gradients through the kernels are summed before those through the adapters are added, so that on a tensor axis the
        compilers reduce one sum over the kernels instead of a gradient for each.
        """
        return _fork(x) if self.tree else (x, x)

    def apply(self, name: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """Adds the output of the adapter of that name to y [..., out...], the product of x [..., in...] and the kernel.
        DoRA's factors are left to `rescale`."""
        if name not in self.tree:
            return y
        own = self.tree[name]
        low = jnp.tensordot(x, own["a"].astype(x.dtype), own["a"].ndim - 1)
        return y + jnp.tensordot(low, own["b"].astype(x.dtype), 1) * self.lora.scaling

    def rescale(self, name: str, kernel: Any, y: jax.Array) -> jax.Array:
        """Multiplies y [..., out...], a result of `apply`, by DoRA's factors if the adapter of that name has them. kernel: the
        stored kernel [in..., out...]."""
        if name not in self.tree or not self.lora.dora:
            return y
        own = self.tree[name]
        ratio = own["ratio"] if "ratio" in own else dora_ratio(adapted_kernel(self.lora, kernel, own), own)
        return y * jnp.expand_dims(ratio.astype(y.dtype), range(y.ndim - ratio.ndim))


@jax.custom_vjp
def _fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


_fork.defvjp(lambda x: ((x, x), None), lambda _, g: (g[0] + g[1],))


def adapted_kernel(lora: LoraAdapters, kernel: Any, own: dict[str, jax.Array]) -> jax.Array:
    """The sum of a layer's stored kernel and its adapter, without DoRA's factors, float32 [in..., out...]."""
    return dense(kernel, jnp.float32) + lora.scaling * jnp.tensordot(own["a"], own["b"], 1)


def dora_ratio(adapted: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
    """DoRA's factors float32 [out...] for the outputs of an `adapted_kernel`."""
    inputs = tuple(range(own["a"].ndim - 1))
    # The paper (section 4.3) treats the norm as a constant in the backward pass.
    return own["magnitude"] / jax.lax.stop_gradient(jnp.sqrt(jnp.sum(jnp.square(adapted), axis=inputs)))


NO_ADAPTERS = Adapters(None, {})


def merge(lora: LoraAdapters, params: dict[str, Any]) -> dict[str, Any]:
    """The base with its adapters merged into the kernels, in the base's dtype, or float32 for quantised kernels. params:
    joined parameters; "score" is kept."""
    blocks = {part: dict(leaves) for part, leaves in params["blocks"].items()}
    for part, leaves in params["adapters"].items():
        for name, own in leaves.items():
            blocks[part][name] = jax.vmap(functools.partial(_merged, lora))(blocks[part][name], own)
    rest = {name: value for name, value in params.items() if name not in ("blocks", "adapters")}
    return jax.tree.map(lambda leaf: dense(leaf, leaf.dtype), {**rest, "blocks": blocks}, is_leaf=is_quantised)


def _merged(lora: LoraAdapters, kernel: jax.Array, own: dict[str, jax.Array]) -> jax.Array:
    """A layer's kernel [in..., out...] with its adapter."""
    merged = adapted_kernel(lora, kernel, own)
    if lora.dora:
        merged = merged * jnp.expand_dims(dora_ratio(merged, own), tuple(range(own["a"].ndim - 1)))
    return merged.astype(kernel.dtype)
