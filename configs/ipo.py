"""Identity preference optimisation (IPO): a squared loss on DPO's pairs, with a finite optimum even for hard labels.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "ipo"
    return config
