"""Best-of-n: eight answers a prompt, the best by the preference model, and supervised fine-tuning on it."""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "preference", "best_of_n", "evaluate", "report")
    return config
