"""Model FLOPs, the basis of the measured utilisation. Recomputation is not counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax

from jaxalign.models.adapters.lora import LINEAR, TRAINED
from jaxalign.models.model import Model


@functools.lru_cache(maxsize=256)
def multiplied(model: Model) -> int:
    """The number of parameters in matrix products per token, in the trunk and its adapters: no embedding lookups, no norms, and
    only the active experts. Heads are counted where they are used."""
    experts = model.config.experts
    share = 1.0 if experts is None else experts.per_token / experts.count
    total = 0.0
    for path, leaf in _leaves(model.base):
        if path[0] == "blocks" and (path[1:] in LINEAR or "router" in path):
            of_experts = experts is not None and path[1] == "mlp" and "router" not in path
            total += math.prod(leaf.shape) * (share if of_experts else 1.0)
    if model.lora is not None:
        total += sum(math.prod(leaf.shape) for path, leaf in _leaves(model) if path[0] in TRAINED and path[-1] in ("a", "b"))
    return round(total)


def _leaves(model: Model):
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract()):
        yield tuple(str(key.key) for key in path), leaf


def forward(model: Model, lengths: Sequence[int], heads: int = 0, before: Sequence[int] = ()) -> float:
    """FLOPs of a forward pass over documents of these lengths: two per parameter and token, plus causal attention (counted as
    if there were no window), plus the LM head at `heads` positions. before: for each document, the number of its first tokens
    whose keys and values are already there; empty: none."""
    config = model.config
    scores = sum(2.0 * n * (n + 1) for n in map(float, lengths)) - sum(2.0 * n * (n + 1) for n in map(float, before))
    attention, tokens = scores * config.heads * config.head_dim * config.layers, float(sum(lengths) - sum(before))
    return 2.0 * multiplied(model) * tokens + attention + 2.0 * config.embed * config.vocab * heads


def learning(model: Model, lengths: Sequence[int], heads: int = 0) -> float:
    """FLOPs of a forward and a backward pass: three times the forward pass, but twice for frozen kernels, whose gradient is not
    computed."""
    whole = 3.0 * forward(model, lengths, heads)
    if model.lora is None:
        return whole
    return whole - 2.0 * multiplied(model.base) * float(sum(lengths)) - 2.0 * model.config.embed * model.config.vocab * heads
