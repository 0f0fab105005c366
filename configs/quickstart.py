"""The default run: from constitution to report on a laptop, in the embedded world. Every value is the default.

Seeds 0, 1 and 2 reduce harmful help on held-out topics from 94.5%, 93.4% and 85.5% for the helpful-only base model to 3.5%,
0.0% and 0.4% (README.md).
"""

from jaxalign.config import default_config


def get_config():
    return default_config()
