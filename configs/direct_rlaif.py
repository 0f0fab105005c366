"""Direct RLAIF: the base model rates each response from 1 to 10, without comparisons or a preference model.

Part of the base model's pretraining text consists of rated answers.

Seed 0 on 2 busy CPU cores reaches harmful help 1.2%, helpful 96.1% and evasive 0.2% on held-out topics, at a KL of 0.36 nats.
The algorithm's own stages take 3.6 minutes, learning from 1,792 responses and ratings by the base model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "ppo", "evaluate", "report")
    config.world.ratings = 0.12
    config.world.tokens = 1_900_000
    config.pretrain.steps = 1900
    config.reward.source = "ai_feedback"
    return config
