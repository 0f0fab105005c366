"""Online DPO: the policy's own fresh pairs, labelled by the base as they come."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "online_dpo", "evaluate", "report")
    return config
