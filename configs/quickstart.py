"""The main job: from constitution to report on a laptop, in the embedded world. All values are the schema's defaults."""

from jaxalign.config import default_config


def get_config():
    return default_config()
