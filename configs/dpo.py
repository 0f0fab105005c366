"""Direct preference optimisation (DPO) on the labelled pairs, after supervised CAI: no preference model, no sampling.

Measured at seed 0 on 2 CPU cores (306 decided pairs): harmful help 2.3%, helpful 96.1%, evasive 5.3% on
held-out topics, at a KL of 0.57 nats; 0.4 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "dpo", "evaluate", "report")
    return config
