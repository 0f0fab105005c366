"""The default run: from constitution to report on a laptop, in the embedded world. Every value is the default.

Seeds 0 and 1 reduce harmful help on held-out topics from 87.5% and 85.9% for the helpful-only base model to 0.8% and 4.3%
(README.md).
"""

from jaxalign.config import default_config


def get_config():
    return default_config()
