"""REINFORCE leave-one-out (RLOO): four responses per prompt, each compared with the mean of the others, no critic.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "rloo"
    config.ppo.group_size = 4
    config.ppo.whiten_advantages = False
    return config
