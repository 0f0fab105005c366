"""The main job: from constitution to report on a laptop, in the embedded world. All values are the defaults."""

from jaxalign.config import default_config


def get_config():
    return default_config()
