"""Simple preference optimisation (SimPO): a margin between mean log-probabilities, without a reference.

Seed 0 on 2 busy CPU cores reaches harmful help 0.8%, helpful 92.2% and evasive 0.2% on held-out topics, at a KL of 0.37 nats.
The algorithm's own stages take 0.5 minutes, learning from the 333 of 2,048 pairs that the base model decided
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "simpo"
    config.dpo.reference = "none"
    config.dpo.beta = 2.0
    return config
