"""The config fields that may change while a stage is unfinished, or after it has finished, without making it out of date."""

from __future__ import annotations

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
