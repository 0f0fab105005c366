"""Kahneman-Tversky optimisation (KTO): learns from single answers, good or bad, instead of pairs.

Seed 0 on 2 busy CPU cores reaches harmful help 0.8%, helpful 84.0% and evasive 0.2% on held-out topics, at a KL of 1.34 nats.
The algorithm's own stages take 1.2 minutes, learning from the 333 of 2,048 pairs that the base model decided
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "kto"
    return config
