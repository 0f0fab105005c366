"""Odds ratio preference optimisation (ORPO): no reference; an odds term beside the supervised loss.

Measured at seed 0 on 2 CPU cores (306 decided pairs): harmful help 2.3%, helpful 97.7%, evasive 2.0% on
held-out topics, at a KL of 0.24 nats; 0.4 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "orpo"
    config.dpo.reference = "none"
    return config
