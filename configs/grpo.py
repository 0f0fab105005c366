"""Group relative policy optimisation (GRPO): eight responses a prompt, no critic, the KL in the loss.

Measured at seed 0 on 2 CPU cores (1,792 responses): harmful help 2.3%, helpful 94.5%, evasive 0.2% on
held-out topics, at a KL of 0.69 nats; 1.0 minutes beyond the stages before it (benchmarks/algorithms_table.py).
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
