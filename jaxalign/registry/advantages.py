"""Advantage estimators: what `config.ppo.advantages` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.registry.core import Registry, load_object


@dataclasses.dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator and what it needs.

    Attributes:
      name: what the config calls it.
      function: `function(inputs: AdvantageInputs) -> (advantages, returns)`, float32 [B, N] both, pure and traceable, or
        "module:attribute" of such a function, imported when it is first used. `AdvantageInputs` and the meaning of its fields
        are in `jaxalign.rl.estimators`. Returns are what the critic learns; zeros without a critic.
      needs_critic: it reads values, so a critic is trained.
      needs_greedy: it reads the score of a greedy response to each prompt, so one is sampled and scored.
      needs_trainer_logprobs: it reads the log-ratios of trainer and sampler, so old log-probs are the trainer's.
      needs_groups: it compares the responses to one prompt, so ppo.group_size must be at least 2.
      values_suffice: it reads rewards, values and the mask alone. With one update of a rollout the critic's forward pass of
        the update then serves, and no other is run.
      reads: the fields of `config.ppo` that it reads beside the record's own needs. A field that some estimator reads and the
        chosen one does not is refused unless it has its default.
    """

    name: str
    function: Callable | str
    needs_critic: bool = False
    needs_greedy: bool = False
    needs_trainer_logprobs: bool = False
    needs_groups: bool = False
    values_suffice: bool = False
    reads: tuple[str, ...] = ()

    def load(self) -> Callable:
        """The function itself."""
        if isinstance(self.function, str):
            return load_object(self.function, f"the function of advantage estimator {self.name!r}")
        return self.function


_HERE = "jaxalign.rl.estimators"

ADVANTAGES = Registry("advantage estimator", AdvantageEstimator, (
    AdvantageEstimator("gae", f"{_HERE}:gae", needs_critic=True, values_suffice=True, reads=("gamma", "lam")),
    AdvantageEstimator("reinforce", f"{_HERE}:reinforce", needs_critic=True, values_suffice=True, reads=("gamma",)),
    AdvantageEstimator("vtrace", f"{_HERE}:vtrace", needs_critic=True, needs_trainer_logprobs=True, reads=("gamma", "lam")),
    AdvantageEstimator("rloo", f"{_HERE}:rloo", needs_groups=True),
    AdvantageEstimator("grpo", f"{_HERE}:grpo", needs_groups=True, reads=("group_scale",)),
    AdvantageEstimator("reinforce_pp", f"{_HERE}:reinforce_pp", reads=("gamma",)),
    AdvantageEstimator("remax", f"{_HERE}:remax", needs_greedy=True),
))  # fmt: skip
