"""Odds ratio preference optimisation (ORPO): a supervised loss plus an odds-ratio term, without a reference.

Seed 0 on 2 busy CPU cores reaches harmful help 4.3%, helpful 91.4% and evasive 2.3% on held-out topics, at a KL of 0.28 nats.
The algorithm's own stages take 0.6 minutes, learning from the 333 of 2,048 pairs that the base model decided
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "orpo"
    config.dpo.reference = "none"
    return config
