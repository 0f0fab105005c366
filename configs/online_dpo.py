"""Online DPO: fresh pairs from the current policy, labelled by the base model as they are sampled.

Seed 0 on 2 busy CPU cores reaches harmful help 1.2%, helpful 98.4% and evasive 0.2% on held-out topics, at a KL of 0.13 nats.
The algorithm's own stages take 2.4 minutes, learning from 1,792 responses in pairs labelled by the base model
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "online_dpo", "evaluate", "report")
    return config
