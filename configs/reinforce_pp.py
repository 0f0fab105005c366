"""REINFORCE++: one response a prompt, returns whitened over the whole batch; no critic."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "reinforce_pp"
    config.ppo.whiten_advantages = False
    return config
