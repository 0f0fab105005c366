"""Stage count."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least
from jaxalign.config.schema import field


@dataclasses.dataclass(frozen=True)
class Count(Section):
    """The number of prompts of the run."""

    prompts: int = field(8, "Number of prompts.", at_least(1))
