"""Direct RLAIF: the base model rates each response from 1 to 10, without comparisons or a preference model.

Part of the base model's pretraining text consists of rated answers.

docs/results.md compares it with the other algorithms.
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
