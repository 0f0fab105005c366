"""The measures of a judge's audit as rows of text, for the terminal and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxalign.reasons import PROBLEMS, audit_warnings, listed
from jaxalign.tracking.formatting import decimal, number, percent, percent_interval
from jaxalign.tracking.table import align, ruled

FILE = "judge_audit.json"
"""The file of an audit in a work directory."""

BUILT_IN = "built-in"
"""The name of the gold pairs in the package, in place of a file's path."""

_OUTSIDE = "Probability outside of the options"

_LARGEST = 1000  # The odds of a judge that always prefers the longer answer are limited only by the prior.

MEANINGS = {
    "Correct, of the decided pairs": "of the pairs with a better answer, when the judge prefers one; 50% is chance",
    "Correct, of all pairs": "an undecided pair is correct only if the answers are equally good; no verdict counts as wrong",
    "Cohen's kappa": "agreement with the correct outcomes (first, second, tie) above chance: 0 is chance, 1 is complete",
    "Flips when the answers are swapped": "how often the judge then prefers the other answer, of the pairs that it decides in "
                                          "both orders; 0% is consistent",
    "Prefers the answer shown first": "of the same pairs, over both orders; 50% is unbiased",
    "Length coefficient": "the change of the log-odds of a preference if an answer of the same quality is twice as long; 0 is "
                          "unbiased",
    "Odds of an answer twice as long": "the same as a factor; 1 is unbiased",
    _OUTSIDE: "the mean probability of a text that is none of the options",
    "Calibration error": "the mean difference between the probability and the share of correct verdicts; 0% is calibrated",
    "Pairs without a verdict": "the judge gave no verdict in both orders",
}
"""The name of each measure, and how to read it."""


def names(content: Mapping[str, Any]) -> list[str]:
    """A short name of the judge of an audit, and after it of each member if it is a jury. content: that of `FILE`."""
    return ["jury", *(f"member {n}" for n in range(1, len(content["members"]) + 1))] if content.get("members") else ["judge"]


def measures(content: Mapping[str, Any]) -> list[list[str]]:
    """A row for each measure: its name, and its value for each of `names` with the 95% interval in parentheses.

    The probability outside of the options is left out if no judge states it.
    """
    cells = [_cells(judge["audit"]) for judge in (content, *(content.get("members") or ()))]
    known = [name for name in MEANINGS if name != _OUTSIDE or any(own[name] != "-" for own in cells)]
    return [[name, *(own[name] for own in cells)] for name in known]


def parts(audited: Mapping[str, Any]) -> list[list[str]]:
    """A row for each principle or kind of pairs: its name, the number of pairs, the accuracy and the flip rate."""
    return [[name, number(part["pairs"]), _share(part["accuracy"]), _share(part["flips"])] for name, part in audited.items()]


PARTS_HEADER = ("Pairs", "Correct, of the decided", "Flips")


def introduction(content: Mapping[str, Any]) -> str:
    """Names the judge and the pairs in one or two sentences."""
    audit, files = content["audit"], content["files"]
    origin = "the built-in set" if files[0]["path"] == BUILT_IN else ", ".join(file["path"] for file in files)
    judge = {"local": "the run's own model", "jury": f"a jury of {len(content.get('members') or ())} models",
             "endpoint": "the model of the server in config.endpoint"}
    return (f"The judge of stage {content['stage']}, {judge.get(content['judge'], content['judge'])}, compared the answers of "
            f"{audit['pairs']:,} gold pairs ({audit['ties']:,} of them ties) from {origin} in both orders, "
            f"{audit['requests']:,} comparisons under the constitution {content['constitution']}.")


def problem_sentence(audit: Mapping[str, Any]) -> str | None:
    """Counts the comparisons without a verdict by reason; None if there are none."""
    problems = audit["problems"]
    return f"{sum(problems.values()):,} comparisons have no verdict: {listed(problems, PROBLEMS)}." if problems else None


def render(content: Mapping[str, Any]) -> str:
    """The audit as plain text, without a trailing newline."""
    sections = [introduction(content)]
    members = [f"member {n} is {member['judge']}" for n, member in enumerate(content.get("members") or (), start=1)]
    sections += ["\n".join(members)] if members else []
    sections.append("\n".join(ruled([["", *names(content)], *measures(content)])))
    for title, field in (("By principle", "principles"), ("By kind of pair", "kinds")):
        if content["audit"][field]:
            sections.append("\n".join(align([[title, *PARTS_HEADER], *parts(content["audit"][field])])))
    notes = [problem_sentence(content["audit"]), *(f"Warning: {sentence}." for sentence in audit_warnings(content["audit"]))]
    return "\n\n".join([*sections, *filter(None, notes)])


def _cells(audit: Mapping[str, Any]) -> dict[str, str]:
    values = (
        _share(audit["accuracy"]), _share(audit["accuracy_all"]), _estimate(audit["kappa"]), _share(audit["flips"]),
        _share(audit["first_position"]), _estimate(audit["length_coefficient"]),
        _estimate(audit["length_coefficient"], as_odds=True), percent(audit["outside"]), percent(audit["calibration_error"]),
        number(audit["without_verdict"]),
    )
    return dict(zip(MEANINGS, values, strict=True))


def _share(share: Mapping[str, Any]) -> str:
    if share["rate"] is None:
        return "-"
    return f"{percent(share['rate'])} of {share['total']:,} ({percent_interval(share)})"


def _estimate(estimate: Mapping[str, Any], as_odds: bool = False) -> str:
    """A value with its interval. as_odds: show the odds instead of their logarithm."""
    numbers = [estimate[name] for name in ("value", "low", "high")]
    if as_odds:
        numbers = [None if number is None else math.exp(number) for number in numbers]
    value, low, high = (f">{_LARGEST:,}" if x is not None and x > _LARGEST else decimal(x, 2) for x in numbers)
    return value if low == "-" else f"{value} ({low} to {high})"
