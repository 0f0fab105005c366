"""REINFORCE++: one response per prompt, returns whitened over the whole batch, no critic.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "reinforce_pp"
    config.ppo.whiten_advantages = False
    return config
