"""Proximal policy optimisation with a critic, after supervised CAI: the main job under the name of its algorithm."""

from jaxalign.config import default_config


def get_config():
    return default_config()
