"""A jury: several judges that answer every comparison and rating together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxalign.feedback.judge import Draw, JudgeProtocol, Text


@dataclasses.dataclass(frozen=True)
class Jury:
    """A `Judge` whose verdicts and ratings are the means of its members'; the first member writes critiques and revisions.

    A member without a verdict does not count. If no member has one, the problem is that of the first member.

    Attributes:
      members: at least one judge. Their weights are on the devices at the same time.
    """

    members: tuple[JudgeProtocol, ...]
    name = "jury"

    @contextlib.contextmanager
    def loaded(self) -> Iterator[Jury]:
        """A context with the weights of all members on the devices."""
        with contextlib.ExitStack() as stack:
            yield Jury(tuple(stack.enter_context(member.loaded()) for member in self.members))

    def _first(self, method: str, requests: Sequence[Any], draw: Draw) -> Sequence[Text]:
        return getattr(self.members[0], method)(requests, draw)

    def _means(self, method: str, field: str, requests: Sequence[Any], draw: Draw) -> list[Any]:
        """The mean of each result, with the largest difference between the probabilities of two members as `disagreement`."""
        means = []
        for results in zip(*(getattr(member, method)(requests, draw) for member in self.members), strict=True):
            outside = [result.outside for result in results if result.outside is not None]
            ties = [result.tie for result in results if getattr(result, "tie", None) is not None]
            notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
            mean = results[0]._replace(outside=float(np.mean(outside)) if outside else None, notes=notes)
            mean = mean._replace(tie=float(np.mean(ties))) if ties else mean
            values = [value for result in results if (value := getattr(result, field)) is not None]
            if values:
                mean = mean._replace(**{field: float(np.mean(values))}, problem=None)
            if field == "probability" and len(values) > 1:
                mean = mean._replace(disagreement=max(values) - min(values))
            means.append(mean)
        return means

    critique = functools.partialmethod(_first, "critique")
    revise = functools.partialmethod(_first, "revise")
    compare = functools.partialmethod(_means, "compare", "probability")
    rate = functools.partialmethod(_means, "rate", "rating")
