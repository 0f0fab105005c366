"""A tiny model with adapters."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxalign.models.adapters.lora import TRAINED, LoraAdapters
from jaxalign.models.model import Model
from tests import tiny

TOKENS = np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32)


def frozen(params: dict) -> dict:
    """The frozen part of an adapted model's parameters: the base without adapters."""
    return {name: value for name, value in params.items() if name not in TRAINED}


def adapted(lora: LoraAdapters, mesh=None, head: str = "lm", seed: int = 1) -> tuple[Model, dict]:
    """A tiny model, and host parameters with adapters that have an effect."""
    model = dataclasses.replace(tiny.model(mesh, head), lora=lora)
    rng = np.random.default_rng(seed)
    alone = dataclasses.replace(tiny.model(head=head), lora=lora)
    fresh = tiny.to_host(alone.init_adapters(tiny.host_params(), jax.random.key(0)))

    def random(path, x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return x * (1 + 0.2 * noise) if path[-1].key == "magnitude" else 0.3 * noise

    return model, {**tiny.host_params(), **jax.tree_util.tree_map_with_path(random, fresh)}
