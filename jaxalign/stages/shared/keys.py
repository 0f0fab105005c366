"""The PRNG keys of stages."""

from __future__ import annotations

import jax

from jaxalign import streams
from jaxalign.stages.shared.base import StageContext


def stage_key(context: StageContext, stage: str, use: int | str = streams.STATE) -> jax.Array:
    """The PRNG key for one use of randomness in one stage. use: a number, or a name in `streams.KEYS[stage]`."""
    return seeded_key(context.stream_seed, stage, use)


def seeded_key(seed: int, stage: str, use: int | str = streams.STATE) -> jax.Array:
    """`stage_key` of a stage of the first round of a run with this seed."""
    number = streams.KEYS[stage][use] if isinstance(use, str) else use
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), streams.number_of(stage, streams.STAGES)), number)
