"""Identity preference optimisation (IPO): a squared loss on DPO's pairs, with a finite optimum even for hard labels.

Seed 0 on 2 busy CPU cores reaches harmful help 1.2%, helpful 96.1% and evasive 0.0% on held-out topics, at a KL of 0.28 nats.
The algorithm's own stages take 0.7 minutes, learning from the 333 of 2,048 pairs that the base model decided
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "ipo"
    return config
