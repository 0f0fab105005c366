"""The outcomes of revisions and comparisons: which rows can be trained on, and why the others cannot.

Nothing is learnt from silently: stages count the rows that they made, those that they can use, and the reasons for the
difference.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from jaxalign.feedback.judge import PROBLEMS, Text

REVISION = PROBLEMS | {
    "no_critique": "the judge wrote no critique, so no revision was requested",
    "critique_refused": "the judge declined to criticise the answer",
    "cut_off": "the text reached the length limit",
    "empty": "the text is empty",
    "grown": "the revision is longer than revise.max_growth times the answer",
    "unchanged": "the revision equals the answer",
}
"""Why a revision or an answer is not an ordinary one, by the name in the field `outcome` of its row."""
KEEPABLE = ("unchanged", "grown", "cut_off", "critique_refused")
"""The outcomes that `sft.keep` may name: the text exists."""
STARTS = (None, "unchanged", "grown")
"""The outcomes after which the next round starts from the revision; after the others, it starts from the previous text."""

COMPARISON = PROBLEMS | {
    "identical": "the two answers are equal",
    "missing_answer": "an answer is missing: its prompt leaves no space, or the policy's logits are not finite",
    "undecided": "the label is within feedback.undecided_margin of 0.5",
}
"""Why a pair has no decided label."""


def answer_outcome(text: str, complete: bool) -> str | None:
    """The outcome of a policy's answer."""
    return "cut_off" if not complete else "empty" if not text.strip() else None


def revision_outcome(response: str, critique: Text, revision: Text | None, max_growth: float) -> str | None:
    """The outcome of a revision; None if it is an ordinary one.

    Args:
      response: the answer that was revised.
      critique: its critique.
      revision: the revision; None if it was not requested.
      max_growth: the largest ratio of the lengths in characters; 0: no limit.
    """
    if revision is None:
        return critique.problem if critique.problem in PROBLEMS and critique.problem != "refused" else "no_critique"
    if revision.problem is not None:
        return revision.problem
    outcome = answer_outcome(revision.text, revision.complete)
    if outcome is not None:
        return outcome
    if critique.problem == "refused":
        return "critique_refused"
    if normalised(revision.text) == normalised(response):
        return "unchanged"
    return "grown" if max_growth and len(revision.text) > max_growth * max(1, len(response)) else None


def normalised(text: str) -> str:
    """A text for the comparison of two: in lower case, with single spaces."""
    return " ".join(text.split()).lower()


def is_usable(outcome: str | None, keep: Sequence[str]) -> bool:
    """Whether a row with this outcome is trained on. keep: `sft.keep`."""
    return outcome is None or outcome in keep


def count_outcomes(outcomes: Iterable[str | None]) -> dict[str, int]:
    """The number of rows by outcome, without ordinary rows, the most frequent first."""
    return dict(collections.Counter(outcome for outcome in outcomes if outcome is not None).most_common())


def usable_sentence(
    what: str, total: int, usable: int, reasons: Mapping[str, int], kept: Mapping[str, int] | None = None,
    known: Mapping[str, str] = REVISION,
) -> str:
    """Says how many rows can be used and why the others cannot.

    Args:
      what: names the rows.
      total: the number of rows.
      usable: the number of rows that can be used.
      reasons: the number of unusable rows by outcome.
      kept: the number of usable rows by outcome, without ordinary ones.
      known: `REVISION` or `COMPARISON`.
    """
    said = f"{usable:,} of {total:,} {what} can be trained on"
    if kept:
        said += " (among them " + ", ".join(f"{count:,} {name}" for name, count in kept.items()) + ")"
    listed = ", ".join(f"{count:,} {name} ({known[name]})" for name, count in reasons.items())
    return said + (f"; left out: {listed}" if listed else "")


_ADVICE = {
    "cut_off": "raise revise.max_new_tokens, start from a model that ends its answers, or set sft.keep to ('unchanged', "
               "'cut_off')",
    "too_long": "raise judge.max_length or model.max_length, or lower revise.max_new_tokens",
    "unchanged": "choose a judge that finds faults, or principles that fit the prompts",
    "refused": "choose another judge or other templates (feedback.templates)",
    "critique_refused": "choose another judge or other templates (feedback.templates)",
    "failed": "correct the judge",
    "nan": "correct the judge, which returned NaN",
    "none": "correct the judge, which returned no result",
    "template": "choose templates that the judge's chat template accepts (feedback.templates)",
    "unreadable": "choose templates for this kind of model (feedback.templates: chat for instruction-tuned models, transcript "
                  "for base models), a better judge, or raise feedback.max_outside_mass",
    "not_finite": "check the judge's weights and model.compute_dtype",
    "grown": "raise revise.max_growth",
    "empty": "choose a judge that writes revisions",
    "no_critique": "choose a judge that writes critiques",
    "identical": "raise compare.temperature",
    "missing_answer": "raise model.max_length, or lower compare.max_new_tokens",
    "undecided": "raise compare.prompts, lower feedback.undecided_margin, or choose a judge that distinguishes the answers",
}


_PAIR_ADVICE = _ADVICE | {
    "cut_off": "raise feedback.max_reasoning_tokens, or set feedback.reasoning to False",
    "too_long": "raise judge.max_length or model.max_length, or lower compare.max_new_tokens",
}


def advice(reasons: Mapping[str, int], known: Mapping[str, str] = REVISION) -> str:
    """The remedy for the most frequent reason for which rows cannot be used. known: `REVISION` or `COMPARISON`."""
    remedies = _PAIR_ADVICE if known is COMPARISON else _ADVICE
    return remedies[max(reasons, key=reasons.get)] if reasons else "give more prompts"
