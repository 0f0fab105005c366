"""Best-of-n: samples eight answers per prompt and fine-tunes on the one that the preference model scores highest.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    config = default_config()
    config.stages = ("pretrain", "revise", "sft", "compare", "preference", "best_of_n", "evaluate", "report")
    return config
