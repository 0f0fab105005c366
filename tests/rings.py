"""Prompts in the layout of a ring."""

from __future__ import annotations

import numpy as np

from jaxalign.models.cache import Caches, Tiers, empty_rings
from jaxalign.models.model import Model
from jaxalign.rollout.ring import insert


def ring_of(model: Model, prompts: Caches, length, slots: int, slot: int | None = None) -> Tiers:
    """A ring with all prompts that `Model.prefill` returns, ending before `slot` (by default, at the end of the first
    prompt)."""
    plan = np.stack([np.arange(len(length)), np.arange(len(length)), length], axis=1).astype(np.int32)[None, None]
    slot = np.int32(length[0] if slot is None else slot)
    return insert(model, (empty_rings(model.abstract_cache(len(length), slots)),), prompts, plan, slot)
