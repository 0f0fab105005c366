"""Group relative policy optimisation (GRPO): eight responses per prompt, no critic, and the KL in the loss.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "grpo"
    config.ppo.group_size = 8
    config.ppo.aggregation = "sequence_mean_token_mean"
    config.ppo.whiten_advantages = False
    config.ppo.kl_in = "loss"
    config.ppo.kl_estimator = "k3"
    return config
