"""The judges of single stages, and the requests that a judge of the user's own fails to answer."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section
from jaxalign.config.constraints import at_least, between
from jaxalign.config.schema import field

_OTHER = "; empty: the judge of feedback.judge."


@dataclasses.dataclass(frozen=True)
class Judge(Section):
    """The judges of single stages, and the requests that a judge of your own fails to answer; see docs/cai.md."""

    revise: str = field("", f"The judge that critiques and revises in stage revise, as in feedback.judge{_OTHER}")
    compare: str = field("", f"The judge that labels the pairs of stage compare, as in feedback.judge{_OTHER}")
    evaluate: str = field("", f"The judge of the win rates of stage evaluate, as in feedback.judge{_OTHER}")
    retries: int = field(2, "How often a call of a judge of your own is repeated after it raised an error. If it still "
                         "raises, its requests are asked one by one; 0: never ask again.", at_least(0))
    max_failed_share: float = field(0.05, "Stop with an error if a judge of your own fails to answer a larger fraction of the "
                                    "requests of a call.", between(0.0, 1.0))
