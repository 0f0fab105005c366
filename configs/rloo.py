"""REINFORCE leave-one-out (RLOO): four responses a prompt, each against the mean of the others; no critic.

Measured at seed 0 on 2 CPU cores (1,792 responses): harmful help 0.8%, helpful 98.4%, evasive 0.0% on
held-out topics, at a KL of 0.34 nats; 0.8 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "rloo"
    config.ppo.group_size = 4
    config.ppo.whiten_advantages = False
    return config
