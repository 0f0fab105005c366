"""Online DPO: fresh pairs from the current policy, labelled by the base model as they are sampled.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "online_dpo", "evaluate", "report")
    return config
