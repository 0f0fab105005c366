"""Policy losses: what `config.ppo.policy_loss` names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.registry.core import Registry, load_object


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and the fields it reads.

    Attributes:
      name: what the config calls it.
      function: `function(inputs: PolicyLossInputs) -> (loss, stats)`, float32 [B, N] and `SurrogateStats` of [B, N] arrays,
        pure and traceable, or "module:attribute" of such a function, imported when it is first used. `PolicyLossInputs` is in
        `jaxalign.rl.policy_losses`, `SurrogateStats` in `jaxalign.algorithms.policy_losses`.
      default_clip: (low, high): the ratio is clipped to [1 - low, 1 + high] where `config.ppo.clip` is not set.
      reads: the fields of `config.ppo` that it reads. A field that some policy loss reads and the chosen one does not is
        refused unless it has its default.
    """

    name: str
    function: Callable | str
    default_clip: tuple[float, float] = (0.2, 0.2)
    reads: tuple[str, ...] = ("clip", "clip_high")

    def load(self) -> Callable:
        """The function itself."""
        if isinstance(self.function, str):
            return load_object(self.function, f"the function of policy loss {self.name!r}")
        return self.function

    def clip_range(self, clip: float | None, clip_high: float | None) -> tuple[float, float]:
        """(low, high) of the clip: the given values, and the loss's own defaults where they are None.

        `clip` alone sets both bounds.
        """
        low, high = self.default_clip if clip is None else (clip, clip)
        return low, high if clip_high is None else clip_high


_HERE = "jaxalign.rl.policy_losses"

POLICY_LOSSES = Registry("policy loss", PolicyLoss, (
    PolicyLoss("clip", f"{_HERE}:clip", reads=("clip", "clip_high", "dual_clip")),
    # The ratio is a geometric mean over the response: the paper's range (arXiv 2507.18071) is far below PPO's.
    PolicyLoss("gspo", f"{_HERE}:gspo", default_clip=(3e-4, 4e-4)),
    PolicyLoss("cispo", f"{_HERE}:cispo"),
    # The clip decides the metric clip_fraction only.
    PolicyLoss("plain", f"{_HERE}:plain"),
))  # fmt: skip
