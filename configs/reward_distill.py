"""RL against a smaller reward model distilled from the preference model; otherwise the same as the default run.

Seed 0 on 2 busy CPU cores reaches harmful help 3.1%, helpful 94.9% and evasive 1.2% on held-out topics, at a KL of 0.83 nats.
The algorithm's own stages take 4.1 minutes, learning from 1,792 responses and a distilled reward model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = (
        "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "ppo", "evaluate", "report",
    )
    config.reward.source = "distilled"
    return config
