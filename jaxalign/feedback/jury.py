"""A jury: several judges that answer every comparison and rating together."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxalign.feedback.judge import (
    ComparisonRequest,
    CritiqueRequest,
    Draw,
    Judge,
    Rating,
    RatingRequest,
    RevisionRequest,
    Text,
    Verdict,
)


@dataclasses.dataclass(frozen=True)
class Jury:
    """A `Judge` whose verdicts and ratings are the means of its members'; the first member writes critiques and revisions.

    A member without a verdict does not count. If no member has one, the problem is that of the first member.

    Attributes:
      members: at least one judge. Their weights are on the devices at the same time.
    """

    members: tuple[Judge, ...]
    name = "jury"

    @contextlib.contextmanager
    def loaded(self) -> Iterator[Jury]:
        """A context with the weights of all members on the devices."""
        with contextlib.ExitStack() as stack:
            yield Jury(tuple(stack.enter_context(member.loaded()) for member in self.members))

    def critique(self, requests: Sequence[CritiqueRequest], draw: Draw) -> Sequence[Text]:
        """The first member's critiques."""
        return self.members[0].critique(requests, draw)

    def revise(self, requests: Sequence[RevisionRequest], draw: Draw) -> Sequence[Text]:
        """The first member's revisions."""
        return self.members[0].revise(requests, draw)

    def compare(self, requests: Sequence[ComparisonRequest], draw: Draw) -> list[Verdict]:
        """The mean probability of each comparison, with the largest difference between two members as `disagreement`."""
        each = zip(*(member.compare(requests, draw) for member in self.members), strict=True)
        return [self._mean(verdicts, "probability") for verdicts in each]

    def rate(self, requests: Sequence[RatingRequest], draw: Draw) -> list[Rating]:
        """The mean of each rating."""
        each = zip(*(member.rate(requests, draw) for member in self.members), strict=True)
        return [self._mean(ratings, "rating") for ratings in each]

    def _mean(self, each: Sequence[Any], field: str) -> Any:
        values = [value for found in each if (value := getattr(found, field)) is not None]
        outside = [found.outside for found in each if found.outside is not None]
        notes = tuple(dict.fromkeys(note for found in each for note in found.notes))
        mean = each[0]._replace(outside=float(np.mean(outside)) if outside else None, notes=notes)
        ties = [found.tie for found in each if getattr(found, "tie", None) is not None]
        mean = mean._replace(tie=float(np.mean(ties))) if ties else mean
        if not values:
            return mean
        more = {"disagreement": max(values) - min(values)} if field == "probability" and len(values) > 1 else {}
        return mean._replace(**{field: float(np.mean(values))}, problem=None, **more)
