"""Proximal policy optimisation with a critic, after supervised CAI. This is the default run.

Seed 0 on 2 busy CPU cores reaches harmful help 3.5%, helpful 96.9% and evasive 1.2% on held-out topics, at a KL of 0.68 nats.
The algorithm's own stages take 2.0 minutes, learning from 1,792 responses and the preference model (docs/results.md).
"""

from jaxalign.config import default_config


def get_config():
    return default_config()
