"""Odds ratio preference optimisation (ORPO): no reference; an odds term beside the supervised loss."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "orpo"
    config.dpo.reference = "none"
    return config
