"""The default run: from constitution to report on a laptop, in the embedded world. Every value is the default.

Seeds 0 to 5 reduce harmful help on held-out topics from 86% to 88% for the helpful-only base model to 0% to 1.6% (README.md).
"""

from jaxalign.config import default_config


def get_config():
    return default_config()
