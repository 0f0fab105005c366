"""Every stream of random numbers of a run, by name. Within a table, no two uses share a stream.

Randomness is positional: a random number depends only on the run's seed, its stream, and its position in the stream (step,
epoch, row). In later rounds (`config.rounds`), `round_seed` replaces the run's seed. There are two families. A JAX PRNG key
is `fold_in(fold_in(key(seed), STAGES[stage]), KEYS...)`; see `jaxalign.stages.shared.base.StageContext.key`. A numpy generator
is seeded with [seed, stream, ...]. The numbers below must never change, since the results of existing runs depend on them; they
do not depend on the order of stages. The numbers of a custom stage are derived from its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

STAGES = {
    "pretrain": 0,
    "revise": 1,
    "sft": 2,
    "compare": 3,
    "preference": 4,
    "ppo": 5,
    "evaluate": 6,
    "report": 7,
    "dpo": 8,
    "online_dpo": 9,
    "best_of_n": 10,
    "reward_distill": 11,
}
"""The first number folded into a stage's PRNG keys."""

# The second number folded into a stage's PRNG key, by its use.
STATE = 0
"""The key kept in a training state, from which RL derives its rollouts and shuffles."""
ADAPTERS = 3
"""Initial values of new LoRA adapters, in every stage that trains."""
SAMPLES = 0
"""Responses of a stage that samples without a training state: revise, compare, best_of_n, evaluate."""
KEYS = {
    "pretrain": {"parameters": 1, "judge": 2},  # Folded into the key of STATE. "judge": of the exported world.
    "revise": {"revisions": 1},
    "compare": {"labels": 1},
    "ppo": {"critic": 1, "ratings": 2, "alarms": 4, "alarm labels": 5, "held out": 6},
    "online_dpo": {"samples": 1, "labels": 2},
    # The labels of comparison i use 1 + i; the ratings by rubrics have a number above all comparisons.
    "evaluate": {"labels": 1, "ratings": 1 << 20},
    "reward_distill": {"samples": 0, "student": 1, "state": 2},
}
"""Other uses, by stage and name."""


def member_head(number: int) -> int:
    """The key of the random head of ensemble member `number`, counted from 0: 1, 2, then 4, 5, ..., since ADAPTERS is 3."""
    return 1 + number if 1 + number < ADAPTERS else 2 + number


LOADERS = {
    "sft": 3,
    "pretrain": 8,
    "best_of_n": 9,
    "preference": 100,  # Ensemble member i uses 100 + i.
    "ppo": 200,
    "dpo": 300,
    "online_dpo": 400,
    "online_dpo minibatches": 401,
    "reward_distill": 500,
    "window of prompts": 700,
}
"""Numpy streams that shuffle a stage's rows: the `stream` of `data.loader.EpochLoader`."""
PRINCIPLES = {"revise": 0, "labels": 1, "ratings": 2, "audit": 600}
"""Numpy streams that draw principles from the constitution, one for each use of a feedback model."""
AUDIT_ORDER = 601
"""The numpy stream that decides which answer of a gold pair a judge sees first."""
DATA = {
    "facts": 1, "requests": 2, "documents": 3, "arithmetic order": 5, "arithmetic examples": 6, "chat documents": 7,
    "judge documents": 8,
}
"""Numpy streams from which data sources generate texts. The numbers may equal those of other tables, whose uses differ."""


def round_seed(seed: int, number: int) -> int:
    """The seed of the PRNG keys and generators of round `number`, in [0, 2**31); that of the first round is the run's seed.

    Generators of data (`DATA`, and the splits of rows) use the run's seed in every round.
    """
    return seed if number == 1 else int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)


def number_of(stage: str, table: Mapping[str, int]) -> int:
    """The number of a built-in or custom stage.

    That of a custom stage is at least 2**31, above every built-in number, and the same in every process and version.

    Args:
      stage: the stage's name.
      table: `STAGES`, for the first number folded into the stage's PRNG keys, or `LOADERS`, for the stream that shuffles its
        rows.
    """
    return table[stage] if stage in table else 2**31 | zlib.crc32(stage.encode())
