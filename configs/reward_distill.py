"""A smaller reward model, distilled from the preference model, rewards RL: all else as in the main job."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = (
        "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "ppo", "evaluate", "report",
    )  # fmt: skip
    config.reward.source = "distilled"
    return config
