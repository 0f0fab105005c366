"""Identity preference optimisation (IPO): DPO's pairs, with a squared loss that does not run away from sure labels."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "ipo"
    return config
