"""Errors for arguments of trainers that belong elsewhere or have another type."""

from __future__ import annotations

import pytest

from jaxalign.config import PPOConfig
from jaxalign.errors import UserError
from jaxalign.rewards.checked import as_reward
from jaxalign.trainers.inputs import settings_from


@pytest.mark.parametrize(("fields", "message"), [
    ({"advantages": len}, "PPO.advantages is .* of type .*; a jaxalign.registries.AdvantageEstimator, or the name or location"),
    ({"policy_loss": len}, "PPO.policy_loss is .*; a jaxalign.registries.PolicyLoss, or the name or location of one, is exp"),
    ({"eval_every": 1}, r"eval_every is an argument of PPO.fit, not of PPO: call fit\(rows, held_out, ...\) with it"),
])
def test_an_argument_is_refused_with_what_is_expected(fields, message):
    with pytest.raises(UserError, match=message):
        settings_from(PPOConfig(), fields, "PPO", None)


def test_an_unknown_reward_lists_the_names():
    with pytest.raises(UserError, match="reward is 'nunber_match'; one of number_match, .* of your own, is expected"):
        as_reward("nunber_match", None)
