"""The config fields that may change while a stage is unfinished, or after it has finished, without making it out of date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxalign.config.schema import leaves

_LIMITS = (
    "data.max_bad_share", "feedback.required_share", "sft.required_share", "sft.required_rows", "best_of_n.required_share",
    "ppo.required_share", "online_dpo.required_share", "reward.max_dropped_share", "preference.on_failure",
)
_CHECKPOINTED = ("pretrain", "sft", "preference", "reward_distill", "dpo", "online_dpo", "ppo")
_WITHOUT_EFFECT = frozenset((*_LIMITS, "reward.backoff_s", *(f"{section}.checkpoint_every" for section in _CHECKPOINTED)))
REPEATED_CALLS = ("reward.retries", "reward.timeout_s")
"""Fields that decide which calls of a reward fail. They may change while a stage is unfinished: responses that have no score by
then stay without one."""


def decides_results(field: str) -> bool:
    """Whether the results of a finished stage can depend on a config field, by its dotted name.

    They do not depend on the limits at which a run stops with an error, on the pause before a failed call is repeated, or on
    the interval of checkpoints.
    """
    return field not in _WITHOUT_EFFECT


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The changes of a trainer's settings on which its results can depend, as "NAME was OLD and is NEW".

    Args:
      old, new: the values of one section's fields, and dictionaries of those of its parts.
    """
    limits = {field.rpartition(".")[2] for field in _WITHOUT_EFFECT}
    before, after = dict(leaves(old)), dict(leaves(new))
    return [f"{name} was {before.get(name, 'absent')!r} and is {after.get(name, 'absent')!r}" for name in before | after
            if name not in limits and (name in before, before.get(name)) != (name in after, after.get(name))]
