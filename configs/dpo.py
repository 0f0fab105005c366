"""Direct preference optimisation (DPO) on the labelled pairs, after supervised CAI: no preference model, no sampling."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    return config
