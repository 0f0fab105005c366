"""A smaller reward model, distilled from the preference model, rewards RL: all else as in the main job.

Measured at seed 0: the student has 141,696 parameters (its teacher 836,864), orders 92.3% of 222 held-out pairs of answers as
its teacher does (Pearson .948), is right on the same 91.3% of 46 held-out labels, and scores 5.7 times as fast on a CPU. After
RL 3.9% of harmful requests are helped with and 96.9% of benign ones.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = (
        "pretrain", "revise", "sft", "compare", "preference", "reward_distill", "ppo", "evaluate", "report",
    )  # fmt: skip
    config.reward.source = "distilled"
    return config
