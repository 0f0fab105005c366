"""Direct RLAIF: the base rates each response from 1 to 10 as it comes; no comparisons and no preference model.

The base must have seen how answers are rated, so a part of its pretraining text shows that.

Measured at seed 0 on 2 CPU cores (1,792 responses): harmful help 2.3%, helpful 99.2%, evasive 0.2% on
held-out topics, at a KL of 0.33 nats; 1.3 minutes beyond the stages before it (benchmarks/algorithms_table.py).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "ppo", "evaluate", "report")
    config.world.ratings = 0.12
    config.world.tokens = 1_450_000
    config.pretrain.steps = 1450
    config.reward.source = "ai_feedback"
    return config
