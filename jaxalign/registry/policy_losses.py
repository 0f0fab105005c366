"""Policy losses: the records that `config.ppo.policy_loss` selects from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxalign.registry.core import Record, Registry
from jaxalign.registry.declarations import declared


@dataclasses.dataclass(frozen=True)
class PolicyLoss(Record):
    """A policy loss and the fields that it reads.

    Attributes:
      name: its name in the config.
      function: `function(inputs: PolicyLossInputs) -> (loss, stats)`, float32 [B, N] and `SurrogateStats` of [B, N] arrays,
        pure and traceable; or "module:attribute" of such a function, imported on first use. `PolicyLossInputs` is in
        `jaxalign.rl.policy_losses`, `SurrogateStats` in `jaxalign.algorithms.policy_losses`.
      default_clip: (low, high): the ratio is clipped to [1 - low, 1 + high] if `config.ppo.clip` is not set.
      reads: the fields of `config.ppo` that it reads. A field that other policy losses read but this one does not must keep
        its default.
    """

    name: str
    function: Callable | str
    default_clip: tuple[float, float] = (0.2, 0.2)
    reads: tuple[str, ...] = ("clip", "clip_high")

    _where = "the {part} of policy loss {name!r}"

    def __post_init__(self) -> None:
        self._require_reads()

    def clip_range(self, clip: float | None, clip_high: float | None) -> tuple[float, float]:
        """(low, high) of the clip. `clip` sets both bounds, `clip_high` only the upper one; None leaves the loss's default."""
        low, high = self.default_clip if clip is None else (clip, clip)
        return low, high if clip_high is None else clip_high


POLICY_LOSSES = Registry("policy loss", PolicyLoss, lambda: declared(PolicyLoss, ("jaxalign.rl.policy_losses",)))
