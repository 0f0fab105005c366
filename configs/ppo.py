"""Proximal policy optimisation with a critic, after supervised CAI. This is the default run.

docs/results.md compares it with the other algorithms.
"""

from jaxalign.config import default_config


def get_config():
    return default_config()
