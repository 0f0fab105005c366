"""Direct preference optimisation (DPO) on the labelled pairs, after supervised CAI: no preference model, no sampling.

Seed 0 on 2 busy CPU cores reaches harmful help 0.8%, helpful 93.8% and evasive 0.2% on held-out topics, at a KL of 0.40 nats.
The algorithm's own stages take 0.7 minutes, learning from 333 pairs (of 2048, those the base could decide on)
(docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    return config
