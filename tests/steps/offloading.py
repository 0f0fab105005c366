"""The optimizer of the tests of offloading, and the kinds of memory of a tree."""

from __future__ import annotations

import jax

from jaxalign.config import Optimizer
from jaxalign.steps.optimizer import make_optimizer

OPTIMIZER = make_optimizer(Optimizer(), 10)


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}
