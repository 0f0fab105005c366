"""Simple preference optimisation (SimPO): a margin between mean log-probabilities, without a reference.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "simpo"
    config.dpo.reference = "none"
    config.dpo.beta = 2.0
    return config
