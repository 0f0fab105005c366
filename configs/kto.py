"""Kahneman-Tversky optimisation (KTO): learns from single answers, good or bad, instead of pairs.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "kto"
    return config
