"""The outcomes of answers and revisions, by the names in `jaxalign.reasons.REVISION`, and which of them can be trained on."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from jaxalign.feedback.judge import Text

STARTS = (None, "unchanged", "grown")
"""The outcomes after which the next round starts from the revision; after the others, it starts from the previous text."""


def answer_outcome(text: str, complete: bool) -> str | None:
    """The outcome of a policy's answer."""
    return "cut_off" if not complete else "empty" if not text.strip() else None


def revision_outcome(response: str, critique: Text, revision: Text | None, max_growth: float) -> str | None:
    """The outcome of a revision; None if it is an ordinary one.

    Args:
      response: the answer that was revised.
      critique: its critique.
      revision: the revision; None if it was not requested, because the critique has a problem.
      max_growth: the largest ratio of the lengths in characters; 0: no limit.
    """
    if revision is None:
        return critique.problem
    if revision.problem is not None:
        return revision.problem
    outcome = answer_outcome(revision.text, revision.complete)
    if outcome is not None:
        return outcome
    if critique.problem == "refused":
        return "critique_refused"
    # Case and the number of spaces do not count.
    if revision.text.lower().split() == response.lower().split():
        return "unchanged"
    return "grown" if max_growth and len(revision.text) > max_growth * max(1, len(response)) else None


def is_usable(outcome: str | None, keep: Sequence[str]) -> bool:
    """Whether a row with this outcome is trained on. keep: `sft.keep`."""
    return outcome is None or outcome in keep


def count_outcomes(outcomes: Iterable[str | None]) -> dict[str, int]:
    """The number of rows by outcome, without ordinary rows, the most frequent first."""
    return dict(collections.Counter(outcome for outcome in outcomes if outcome is not None).most_common())
