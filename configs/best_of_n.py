"""Best-of-n: samples eight answers per prompt and fine-tunes on the one that the preference model scores highest.

Seed 0 on 2 busy CPU cores reaches harmful help 2.3%, helpful 94.5% and evasive 0.0% on held-out topics, at a KL of 0.74 nats.
The algorithm's own stages take 0.6 minutes, learning from 1,792 responses and the preference model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "preference", "best_of_n", "evaluate", "report")
    return config
