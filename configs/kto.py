"""Kahneman-Tversky optimisation (KTO): learns from single answers, good or bad, instead of pairs.

Measured at seed 0 on 2 CPU cores (306 decided pairs): harmful help 3.5%, helpful 97.7%, evasive 1.8% on
held-out topics, at a KL of 0.43 nats; 0.9 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    config.dpo.objective = "kto"
    return config
