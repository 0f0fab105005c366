"""Direct preference optimisation (DPO) on the labelled pairs, after supervised CAI, without a preference model or sampling.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    return config
