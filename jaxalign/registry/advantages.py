"""Advantage estimators: the records that `config.ppo.advantages` selects from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.registry.core import Record, Registry
from jaxalign.registry.declarations import declared


@dataclasses.dataclass(frozen=True)
class AdvantageEstimator(Record):
    """An advantage estimator and its requirements.

    Attributes:
      name: its name in the config.
      function: `function(inputs: AdvantageInputs) -> (advantages, returns)`, both float32 [B, N], pure and traceable; or
        "module:attribute" of such a function, imported on first use. `jaxalign.rl.estimators` documents `AdvantageInputs`.
        The returns are the critic's targets, or zeros without a critic.
      needs_critic: it reads values, so a critic is trained.
      needs_greedy: it reads the score of a greedy response to each prompt, which is then sampled and scored.
      needs_trainer_logprobs: it reads the log-ratios of trainer and sampler, so the trainer recomputes the old log-probs.
      needs_groups: it compares the responses to one prompt, so ppo.group_size must be at least 2.
      values_suffice: it reads only rewards, values and the mask. With a single update per rollout, the values then come from
        the critic's forward pass in the update, and no separate forward pass runs.
      reads: the fields of `config.ppo` that it reads. A field that other estimators read but this one does not must keep its
        default.
    """

    name: str
    function: Callable | str
    needs_critic: bool = False
    needs_greedy: bool = False
    needs_trainer_logprobs: bool = False
    needs_groups: bool = False
    values_suffice: bool = False
    reads: tuple[str, ...] = ()

    _where = "the {part} of advantage estimator {name!r}"

    def __post_init__(self) -> None:
        self._require_reads()


ADVANTAGES = Registry("advantage estimator", AdvantageEstimator,
                      lambda: declared(AdvantageEstimator, ("jaxalign.rl.estimators",)))
