"""REINFORCE leave-one-out (RLOO): four responses per prompt, each compared with the mean of the others, no critic.

Seed 0 on 2 busy CPU cores reaches harmful help 2.0%, helpful 96.5% and evasive 0.0% on held-out topics, at a KL of 0.41 nats.
The algorithm's own stages take 1.5 minutes, learning from 1,792 responses and the preference model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "rloo"
    config.ppo.group_size = 4
    config.ppo.whiten_advantages = False
    return config
