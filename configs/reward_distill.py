"""RL against a smaller reward model distilled from the preference model; otherwise the same as the default run.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = (
        "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "ppo", "evaluate", "report",
    )
    config.reward.source = "distilled"
    return config
