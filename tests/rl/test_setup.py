"""The setup of RL: which setups are equal, and so share programs."""

from __future__ import annotations

import dataclasses

from jaxalign.config import PPOConfig
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.rl.state import make_ppo_setup
from tests import tiny
from tests.extending.plugins import advantage, policy_loss


def test_equal_settings_give_equal_setups_unless_a_function_of_the_users_has_a_name_in_them():
    """A name in the settings may stand for another function in a later run of the process."""
    section, policy = PPOConfig(), tiny.model()
    assert make_ppo_setup(section, policy) == make_ppo_setup(dataclasses.replace(section), policy)
    ADVANTAGES.register(advantage.CENTRED)
    POLICY_LOSSES.register(policy_loss.OFFSET)
    try:
        for own in ({"advantages": "centred"}, {"policy_loss": "offset"}):
            section = dataclasses.replace(PPOConfig(), **own)
            assert make_ppo_setup(section, policy) != make_ppo_setup(section, policy)
    finally:
        ADVANTAGES.unregister("centred")
        POLICY_LOSSES.unregister("offset")
