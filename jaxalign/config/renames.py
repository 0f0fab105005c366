"""Old names of fields. Config files, flags and manifests of old work directories may still use them; each use is reported."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import config_dict

from jaxalign.errors import UserError
from jaxalign.registry.policy_losses import POLICY_LOSSES


@dataclasses.dataclass(frozen=True)
class Rename:
    """A renamed or removed field.

    Attributes:
        old: the old dotted name.
        new: the new dotted names; empty if the field was removed.
        values: `values(old value)` returns the new fields' values in the order of `new`; None: all get the old value.
        remedy: for a removed field, what to set instead.
    """

    old: str
    new: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]] | None = None
    remedy: str = ""

    def apply(self, value: Any) -> dict[str, Any]:
        """The values of the new fields, by dotted name."""
        values = (value,) * len(self.new) if self.values is None else self.values(value)
        return dict(zip(self.new, values, strict=True))

    @property
    def sentence(self) -> str:
        names = ", ".join(f"config.{name}" for name in self.new)
        if names:
            return f"config.{self.old} is now called {names}; the old name still works"
        return f"config.{self.old} no longer has an effect: {self.remedy}"


def _one_policy(value: Any) -> tuple[Any, ...]:
    """A single field used to set the action of every RL check. Only the first two can also recompute."""
    other = "stop" if value == "stop" else "warn"
    return value, value, other, other


_TOKENS = "set {}.micro_batch_tokens, the tokens of a micro-batch, instead; results do not depend on it"

RENAMES = (
    Rename("ppo.on_sampler_gap",
           ("ppo.checks.ratio", "ppo.checks.sampler_gap", "ppo.checks.reference_kl", "ppo.checks.micro_batches"), _one_policy),
    *(Rename(f"{stage}.micro_batches", (), remedy=_TOKENS.format(stage)) for stage in ("preference", "dpo", "ppo")),
)
"""Every rename, applied in this order: for a field renamed twice, the oldest name comes first."""


def with_current_names(values: Mapping[str, Any] | config_dict.ConfigDict) -> Any:
    """`values`, nested by section, with the fields' current names; a copy if `values` has old names."""
    if not any(_owner(values, rename) for rename in RENAMES):
        return values
    values = _copied(values)
    rename_in_place(values)
    return values


def rename_in_place(values: Any) -> None:
    """Replaces old field names by the current ones, in nested dictionaries or a ConfigDict."""
    for rename in RENAMES:
        owner = _owner(values, rename)
        if owner is None:
            continue
        report(rename)
        name = rename.old.rpartition(".")[2]
        changes = rename.apply(owner[name])
        del owner[name]
        for new, value in changes.items():
            *sections, name = new.split(".")
            owner = values
            for part in sections:
                if part not in owner:
                    owner[part] = {}
                owner = owner[part]
            owner[name] = value


def leaves_with_current_names(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Like `with_current_names`, for values keyed by full dotted name, as in a manifest."""
    leaves = dict(leaves)
    for rename in RENAMES:
        if rename.old in leaves:
            report(rename)
            leaves.update(rename.apply(leaves.pop(rename.old)))
    return leaves


_NO_RESULT = ("preference.on_failure",)
"""Fields that decide only whether a run continues after a stage: changing them leaves its results valid."""


def effective(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `leaves`, keyed by dotted name, that determine results.

    An unset ppo.clip and ppo.clip_high are replaced by the policy loss's own range. Older manifests contain the numbers,
    because those were the defaults. With this replacement both forms compare equal.
    """
    leaves = {name: value for name, value in leaves.items() if name not in _NO_RESULT}
    try:
        loss = POLICY_LOSSES.get(leaves["ppo.policy_loss"], "config.ppo.policy_loss")
    except (KeyError, UserError):  # Another section, or a loss that no longer exists.
        return leaves
    low, high = loss.clip_range(leaves.get("ppo.clip"), leaves.get("ppo.clip_high"))
    return leaves | {"ppo.clip": low, "ppo.clip_high": high}


def current_names(name: str) -> tuple[str, ...]:
    """The current names of the field or section `name`; `name` itself if it was never renamed."""
    rename = rename_of(name)
    return (name,) if rename is None else rename.new


def rename_of(name: str) -> Rename | None:
    """The rename with old name `name`; None if there is none."""
    return next((rename for rename in RENAMES if rename.old == name), None)


@functools.cache
def report(rename: Rename) -> None:
    """Prints a rename's sentence, once per process."""
    print(rename.sentence, flush=True)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, config_dict.ConfigDict))


def _copied(values: Any) -> dict[str, Any]:
    """A copy as nested dictionaries, so that the caller's values do not change."""
    return {name: _copied(values[name]) if _is_mapping(values[name]) else values[name] for name in values}


def _owner(values: Any, rename: Rename) -> Any:
    """The section in `values` that has a field with the old name; None if there is none."""
    *sections, name = rename.old.split(".")
    for part in sections:
        values = values[part] if _is_mapping(values) and part in values else None
    return values if _is_mapping(values) and name in values else None
