"""Odds ratio preference optimisation (ORPO): a supervised loss plus an odds-ratio term, without a reference.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "orpo"
    config.dpo.reference = "none"
    return config
