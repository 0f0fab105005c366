"""REINFORCE++: one response per prompt, returns whitened over the whole batch, no critic.

Seed 0 on 2 busy CPU cores reaches harmful help 3.5%, helpful 94.5% and evasive 0.0% on held-out topics, at a KL of 0.77 nats.
The algorithm's own stages take 1.2 minutes, learning from 1,792 responses and the preference model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "reinforce_pp"
    config.ppo.whiten_advantages = False
    return config
