"""REINFORCE++: one response a prompt, returns whitened over the whole batch; no critic.

Measured at seed 0 on 2 CPU cores (1,792 responses): harmful help 3.1%, helpful 95.7%, evasive 0.0% on
held-out topics, at a KL of 0.67 nats; 0.6 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.ppo.advantages = "reinforce_pp"
    config.ppo.whiten_advantages = False
    return config
