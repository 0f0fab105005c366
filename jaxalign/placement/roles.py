"""The roles of models in reinforcement learning, the phases in which they run, and which of them may run at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxalign.placement.names import require_known

PHASES = ("generation", "scoring", "update")
"""The phases of an iteration, in order. Each needs the results of the one before."""


@dataclasses.dataclass(frozen=True)
class Role:
    """What a model does in an iteration.

    Attributes:
      name: the role's name.
      work: what the role does, completing the sentence "the role ...".
      phases: by phase in which it runs, the roles whose results or weights it needs within the phase.
      trained: whether an optimizer updates its weights.
      shadows: the role whose weights it receives before each iteration; empty if it has its own.
      several: whether a run may have several models with this role.
    """

    name: str
    work: str
    phases: Mapping[str, tuple[str, ...]]
    trained: bool = False
    shadows: str = ""
    several: bool = False


_SCORERS = ("reference", "reward", "judge", "value")
"""Roles whose results the program that computes advantages reads; it also runs the policy and the critic."""

ROLES = {role.name: role for role in (
    Role("policy", "samples responses unless there is a generator, computes their log-probabilities, and is updated",
         {"generation": (), "scoring": _SCORERS, "update": ()}, trained=True),
    Role("critic", "computes values unless there is a value role, and is updated",
         {"scoring": _SCORERS, "update": ()}, trained=True),
    Role("reference", "computes the log-probabilities of responses for the KL penalty", {"scoring": ()}),
    Role("reward", "scores responses", {"scoring": ()}, several=True),
    Role("judge", "rates responses", {"scoring": ()}),
    Role("generator", "samples responses", {"generation": ("policy",)}, shadows="policy"),
    Role("value", "computes the values of responses", {"scoring": ()}, shadows="critic"),
)}
"""All roles by name."""

SHADOWS = {role.shadows: role.name for role in ROLES.values() if role.shadows}
"""The role that may run in place of another, by the name of the other."""


def role_of(name: str) -> Role:
    """The role of a model: `name` is that of a role, or "reward.NAME" for one of several reward models.

    Raises:
      UserError: there is no such role.
    """
    kind, dot, own = name.partition(".")
    if dot and own and kind in ROLES and ROLES[kind].several:
        return ROLES[kind]
    require_known("role", name, ROLES)
    return ROLES[name]


def independent(first: str, second: str) -> bool:
    """Whether two models may run at the same time: both run in some phase, in which neither needs the other.

    In scoring these are the reference, the reward models, the judge and the shadow of the critic; in the update, the policy and
    the critic. A model is not independent of itself.

    Raises:
      UserError: there is no such role.
    """
    if first == second:
        return False
    a, b = role_of(first), role_of(second)
    return any(b.name not in a.phases[phase] and a.name not in b.phases[phase]
               for phase in PHASES if phase in a.phases and phase in b.phases)
