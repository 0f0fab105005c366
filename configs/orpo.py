"""Odds ratio preference optimisation (ORPO): no reference; an odds term beside the supervised loss.

Seed 0 on 2 busy CPU cores reaches harmful help 4.3%, helpful 91.4% and evasive 2.3% on held-out topics, at a KL of 0.28 nats.
The algorithm's own stages take 0.6 minutes, learning from 333 pairs (of 2048, those the base could decide on)
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "orpo"
    config.dpo.reference = "none"
    return config
