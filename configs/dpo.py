"""Direct preference optimisation (DPO) on the labelled pairs, after supervised CAI, without a preference model or sampling.

Seed 0 on 2 busy CPU cores reaches harmful help 0.8%, helpful 93.8% and evasive 0.2% on held-out topics, at a KL of 0.40 nats.
The algorithm's own stages take 0.7 minutes, learning from the 333 of 2,048 pairs that the base model decided
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    return config
