"""Old names of fields, accepted in config files, flags and manifests of old work directories, each with a line that says so."""

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
    """A field that has another name now.

    Attributes:
        old: its dotted name before.
        new: its dotted names now; empty: it is no longer read.
        values: `values(old value)`, the new fields' values in the order of `new`; None: all have the old value.
        remedy: for a field that is no longer read, what to set instead.
    """

    old: str
    new: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]] | None = None
    remedy: str = ""

    def apply(self, value: Any) -> dict[str, Any]:
        """The new fields by dotted name."""
        values = (value,) * len(self.new) if self.values is None else self.values(value)
        return dict(zip(self.new, values, strict=True))

    @property
    def sentence(self) -> str:
        names = ", ".join(f"config.{name}" for name in self.new)
        if names:
            return f"config.{self.old} is now called {names}; the old name still works"
        return f"config.{self.old} is no longer read: {self.remedy}"


def _one_policy(value: Any) -> tuple[Any, ...]:
    """One field ruled every check of RL; all checks but the sampler's could only warn or stop."""
    other = "stop" if value == "stop" else "warn"
    return value, value, other, other


_TOKENS = "a micro-batch now holds a number of tokens, {}.micro_batch_tokens; results do not depend on it"

RENAMES = (
    Rename("ppo.on_sampler_gap",
           ("ppo.checks.ratio", "ppo.checks.sampler_gap", "ppo.checks.reference_kl", "ppo.checks.micro_batches"), _one_policy),
    *(Rename(f"{stage}.micro_batches", (), remedy=_TOKENS.format(stage)) for stage in ("preference", "dpo", "ppo")),
)
"""Every rename. A chain of them is applied in order, so that the oldest name comes first."""


def with_current_names(values: Mapping[str, Any] | config_dict.ConfigDict) -> Any:
    """`values`, nested by section, with the current names of fields; a copy where it has old ones."""
    if not any(_owner(values, rename) for rename in RENAMES):
        return values
    values = _copied(values)
    rename_in_place(values)
    return values


def rename_in_place(values: Any) -> None:
    """Replaces old names of fields in nested dictionaries or a ConfigDict by the current ones."""
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
    """As `with_current_names` for values by full dotted name, as in a manifest."""
    leaves = dict(leaves)
    for rename in RENAMES:
        if rename.old in leaves:
            report(rename)
            leaves.update(rename.apply(leaves.pop(rename.old)))
    return leaves


def effective(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`leaves`, by dotted name, with the clip range that the policy loss uses where ppo.clip or clip_high is not set.

    A manifest from before that default was the loss's own states the numbers, so both forms compare equal.
    """
    try:
        loss = POLICY_LOSSES.get(leaves["ppo.policy_loss"], "config.ppo.policy_loss")
    except (KeyError, UserError):  # Another section, or a loss that is no longer there.
        return dict(leaves)
    low, high = loss.clip_range(leaves.get("ppo.clip"), leaves.get("ppo.clip_high"))
    return dict(leaves) | {"ppo.clip": low, "ppo.clip_high": high}


def current_names(name: str) -> tuple[str, ...]:
    """The names that the field or section `name` has now: its own where it was never renamed."""
    rename = rename_of(name)
    return (name,) if rename is None else rename.new


def rename_of(name: str) -> Rename | None:
    """The rename whose old name is `name`; None where it was never renamed."""
    return next((rename for rename in RENAMES if rename.old == name), None)


@functools.cache
def report(rename: Rename) -> None:
    """Prints a rename's sentence once in a process."""
    print(rename.sentence, flush=True)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (Mapping, config_dict.ConfigDict))


def _copied(values: Any) -> dict[str, Any]:
    """Nested dictionaries, so that the caller's values stay as they are."""
    return {name: _copied(values[name]) if _is_mapping(values[name]) else values[name] for name in values}


def _owner(values: Any, rename: Rename) -> Any:
    """The section in `values` that has a field of the old name; None where there is none."""
    *sections, name = rename.old.split(".")
    for part in sections:
        values = values[part] if _is_mapping(values) and part in values else None
    return values if _is_mapping(values) and name in values else None
