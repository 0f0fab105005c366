"""Group relative policy optimisation (GRPO): eight responses per prompt, no critic, and the KL in the loss.

Seed 0 on 2 busy CPU cores reaches harmful help 1.6%, helpful 97.7% and evasive 0.0% on held-out topics, at a KL of 0.71 nats.
The algorithm's own stages take 1.9 minutes, learning from 1,792 responses and the preference model (docs/results.md).
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
