"""Why a row or a judge's result cannot be used: the names in rows and summaries, their explanations, and what to do about them.

The stages print these sentences, and the report shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROBLEMS = {
    "failed": "the judge raised an error for this request, also when it was asked again",
    "nan": "the judge returned NaN",
    "none": "the judge returned None",
    "refused": "the judge declined to answer",
    "unreadable": "the answer is none of the options, or most of its probability lies outside of them",
    "cut_off": "the judge's text reached the length limit",
    "too_long": "the request does not fit into the judge's context",
    "template": "the judge's chat template rejects the request",
    "not_finite": "the judge's logits are not finite numbers",
}
"""The reasons why a request has no usable result, by the name that `Text`, `Verdict` and `Rating` give as `problem`."""

NOTES = {
    "preamble": "an introduction was removed",
    "next_turn": "the text was cut at the beginning of another turn",
    "shortened": "the judge did not see the oldest turns of the dialogue",
    "fewer_exemplars": "the judge saw fewer examples, since its context is too short",
    "top_logprobs": "the verdict was read from the most likely tokens that the server shows",
    "option_missing": "an option was not among the tokens that the server shows, and its probability counts as 0",
    "votes": "the verdict is the share of each option among sampled answers",
}
"""Facts about a judge's text that do not prevent its use, by the name that `Text`, `Verdict` and `Rating` give in `notes`."""

REVISION = PROBLEMS | {
    "critique_refused": "the judge declined to criticise the answer",
    "cut_off": "the text reached the length limit",
    "empty": "the text is empty",
    "grown": "the revision is longer than revise.max_growth times the answer",
    "unchanged": "the revision equals the answer",
}
"""Why a revision or an answer is not an ordinary one, by the name in the field `outcome` of its row."""

COMPARISON = PROBLEMS | {
    "identical": "the two answers are equal",
    "missing_answer": "an answer is missing: its prompt leaves no space, or the policy's logits are not finite",
    "undecided": "the label is too close to 0.5",
    "tie": "the judge says that neither answer is better",
    "order": "the judge prefers the other answer when they are shown in the other order",
    "conflict": "the principles prefer different answers",
}
"""Why a pair has no decided label."""


def listed(counts: Mapping[str, int], known: Mapping[str, str]) -> str:
    """The counts by name with the explanations of the names: "12 cut_off (the text reached the length limit), ..."."""
    return ", ".join(f"{count:,} {name}" + (f" ({known[name]})" if name in known else "") for name, count in counts.items())


def usable_sentence(
    rows: str, total: int, usable: int, reasons: Mapping[str, int], kept: Mapping[str, int] | None = None,
    known: Mapping[str, str] = REVISION,
) -> str:
    """Says how many rows can be used and why the others cannot.

    Args:
      rows: the name of the rows.
      total: the number of rows.
      usable: the number of rows that can be used.
      reasons: the number of unusable rows by outcome.
      kept: the number of usable rows by outcome, without ordinary ones.
      known: `REVISION` or `COMPARISON`.
    """
    among, others = listed(kept or {}, {}), listed(reasons, known)
    said = f"{usable:,} of {total:,} {rows} can be trained on" + (f" (among them {among})" if among else "")
    return said + (f"; left out: {others}" if others else "")


def few_usable(section: Any, total: int, usable: int) -> str | None:
    """A sentence if the usable rows are fewer than `min_rows`, or a smaller share of all rows than `min_share`; else None.

    section: an object with these two attributes, such as config.sft.
    """
    if usable < section.min_rows:
        rows = "row" if usable == 1 else "rows"
        return f"only {usable:,} {rows} can be trained on, fewer than sft.min_rows ({section.min_rows})"
    if usable < section.min_share * total:
        return f"only {usable / total:.0%} of the rows can be trained on, less than sft.min_share ({section.min_share:.0%})"
    return None


def too_few(total: int, usable: int, field: str, least: float) -> str | None:
    """A sentence that names the field with the smallest accepted share of usable rows, if theirs is smaller; else None."""
    if usable >= least * total:
        return None
    return f"config.{field} is {least:g}, but only {usable:,} of {total:,} rows ({usable / total:.1%}) can be used"


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
    "identical": "raise compare.temperature",
    "missing_answer": "raise model.max_length, or lower compare.max_new_tokens",
    "undecided": "raise compare.prompts, lower feedback.undecided_margin, or choose a judge that distinguishes the answers",
    "tie": "raise compare.samples or feedback.principles_per_comparison, so that the answers differ on what is asked",
    "order": "choose another judge or other templates (feedback.templates)",
    "conflict": "ask under fewer principles (feedback.principles_per_comparison), or set feedback.aggregate to 'strongest'",
}


_PAIR_ADVICE = _ADVICE | {
    "cut_off": "raise feedback.max_reasoning_tokens, or set feedback.reasoning to False; set feedback.thinking to 'off' for a "
               "model that thinks before it answers",
    "too_long": "raise judge.max_length or model.max_length, or lower compare.max_new_tokens",
}


_ONLINE_ADVICE = _PAIR_ADVICE | {
    "too_long": "raise judge.max_length or model.max_length, or lower online_dpo.max_new_tokens",
    "identical": "raise online_dpo.temperature",
    "missing_answer": "raise model.max_length, or lower online_dpo.max_new_tokens",
    "undecided": "lower feedback.undecided_margin, or choose a judge that distinguishes the answers",
    "tie": "raise feedback.principles_per_comparison, so that the answers differ on what is asked",
}


def advice(reasons: Mapping[str, int], known: Mapping[str, str] = REVISION, online: bool = False) -> str:
    """The remedy for the most frequent reason for which rows cannot be used.

    Args:
      reasons: the number of unusable rows by outcome.
      known: `REVISION` or `COMPARISON`.
      online: whether the rows are pairs of stage online_dpo.
    """
    remedies = _ONLINE_ADVICE if online else _PAIR_ADVICE if known is COMPARISON else _ADVICE
    return remedies.get(max(reasons, key=reasons.get) if reasons else "", "give more prompts")


LEAST_ONLINE = 0.05
"""Stage online_dpo warns if a smaller share of an iteration's pairs can be trained on."""


LEAST_DECIDED = 0.1
"""Too few pairs are decided if their share is smaller."""


def pairs_sentence(summary: Mapping[str, Any]) -> str:
    """Says how many pairs have a decided label and why the others have none. summary: that of stage compare."""
    total, outcomes = summary["pairs"], summary["outcomes"]
    others = listed(outcomes, COMPARISON)
    decided = f"{total - sum(outcomes.values()):,} of {total:,} pairs have a decided label"
    return decided + (f"; the others: {others}" if others else "")


def missing_verdicts_sentence(summary: Mapping[str, Any]) -> str | None:
    """Says how many of the verdicts that the judge was asked for are missing, and why; None if there are all, or if the summary
    is an older one that does not count them. summary: that of stage compare."""
    problems = summary.get("problems")
    if not problems:
        return None
    return f"{sum(problems.values()):,} of {summary['requests']:,} verdicts are missing: {listed(problems, PROBLEMS)}"


def self_agreement_sentence(summary: Mapping[str, Any]) -> str:
    """Says how often the judge agrees with itself, and which margin its labels have. summary: that of stage compare."""
    agreement, calibration = summary["order_agreement"], summary["calibration"]
    if agreement is None:
        return "no pair has a verdict in both orders"
    sentence = f"the labeller agrees with itself on {agreement:.0%} of the verdicts that it gave in both orders"
    margin = f"a label is decided if it differs from 0.5 by more than {calibration['margin']:.2f}"
    chance = calibration["chance_share"]
    return f"{sentence}; {margin}" + ("" if chance is None else f", where about {chance:.0%} of the labels are due to chance")


def gold_labels_sentence(quality: Mapping[str, Any]) -> str:
    """Says how many labels are right by the gold judge. quality: `data.world.label_scores.label_quality`."""
    counts = quality["any_axis"]
    return (f"of {quality['decided']:,} decided labels, {counts['right']:,} prefer the answer that is better by the gold judge "
            f"on an axis of the pair's principles, {counts['wrong']:,} the worse one, and {counts['equal']:,} one of two equal "
            "answers")


LARGE_CHANCE = 0.2
"""Too many decided labels are due to chance if their estimated share is larger."""


MOSTLY = 0.5
"""The share from which a loss needs a warning: of a judge's probability outside of the options, of rows that are dropped, or of
scores that are changed."""


def mostly_dropped(path: str, rows: int, kept: int, too_long: int) -> str | None:
    """A sentence if more than half of the rows of a file were dropped, but not all; else None. too_long: the number of rows
    that were dropped because of their length."""
    if not 0 < kept < MOSTLY * rows:
        return None
    longer = "; raise model.max_length, and preference.max_length for pairs and judged answers, if model and memory allow it"
    return f"only {kept:,} of {rows:,} rows of {path} can be used" + (longer if too_long > MOSTLY * (rows - kept) else "")


LARGE_CONTRADICTED = 0.05
"""Too many rows contradict an earlier row if their share is larger."""


def often_contradicted(path: str, kept: int, contradicted: int) -> str | None:
    """A sentence if more than 5% of the rows of a file that are kept contradict an earlier row; else None."""
    if contradicted <= LARGE_CONTRADICTED * kept:
        return None
    return (f"{contradicted:,} of {kept:,} rows of {path} contradict an earlier row; remove these rows, or correct their "
            "labels or data.columns")


def label_warnings(summary: Mapping[str, Any], max_new_tokens: int | None = None) -> list[str]:
    """Sentences with remedies if few pairs have a decided label, if most have no verdict at all, if the judge gave most of its
    probability to text other than the options, if many of the decided labels are due to chance, or if most of the compared
    answers did not end.

    Args:
      summary: that of stage compare.
      max_new_tokens: `compare.max_new_tokens`, if it is known.
    """
    warnings = []
    total, mass, chance = summary["pairs"], summary.get("outside_mass"), summary["calibration"]["chance_share"]
    decided = total - sum(summary["outcomes"].values())
    remedy = "choose a better judge, or other templates (feedback.templates)"
    unread = sum(count for name, count in summary["outcomes"].items() if name in PROBLEMS or name == "missing_answer")
    if decided < LEAST_DECIDED * total:
        warnings.append(f"only {decided:,} of {total:,} pairs have a decided label: {pair_advice(summary)}")
    elif unread > MOSTLY * total:
        warnings.append(f"{unread:,} of {total:,} pairs have no answers, or no verdict that could be read: "
                        f"{pair_advice(summary)}")
    if mass is not None and mass > MOSTLY:
        warnings.append(f"the judge gave {mass:.0%} of its probability to text other than the options, so its verdicts say "
                        f"little; {remedy}")
    if chance is not None and chance > LARGE_CHANCE:
        warnings.append(f"about {chance:.0%} of the decided labels are due to chance, since the judge contradicts itself as "
                        f"often in the other order; {remedy}")
    unended, compared = incomplete_answers(summary)
    if unended > MOSTLY * compared:
        limit = "compare.max_new_tokens" + (f" ({max_new_tokens})" if max_new_tokens else "")
        warnings.append(f"{unended:,} of {compared:,} compared answers did not end within {limit}, but training treats them as "
                        "complete; raise it, or start from a model that ends its answers")
    return warnings


def incomplete_answers(summary: Mapping[str, Any]) -> tuple[int, int]:
    """(the compared answers that did not end, all compared answers), by the summary of stage compare.

    Two equal answers are not compared. An older summary counts no answers that did not end.
    """
    return summary.get("incomplete") or 0, 2 * ((summary["pairs"] or 0) - (summary.get("identical_pairs") or 0))


def without_verdict(outcomes: Mapping[str, int]) -> dict[str, int]:
    """The number of pairs without a verdict by its problem. outcomes: the number of undecided pairs by outcome."""
    return {name: count for name, count in outcomes.items() if name in PROBLEMS}


def verdict_warning(win_rate: Mapping[str, Any], pair: str) -> str | None:
    """A sentence if most pairs of two models have no verdict, or if the judge contradicts itself on most of them in the other
    order, so that each counts as a tie; else None.

    Args:
      win_rate: the result of `trainers.evaluation.won`, or a row of it in a summary.
      pair: the names of the models.
    """
    outcomes, total = win_rate.get("outcomes") or {}, win_rate["total"]
    problems, contradicted = without_verdict(outcomes), outcomes.get("order", 0)
    count = sum(problems.values())
    if contradicted > MOSTLY * total:
        return (f"the judge prefers the other answer when they are shown in the other order for {contradicted:,} of {total:,} "
                f"pairs of {pair}, and each counts as a tie; choose another judge or other templates (feedback.templates)")
    if count <= MOSTLY * total:
        return None
    return (f"the judge gave no verdict on {count:,} of {total:,} pairs of {pair}, and each counts as a tie: "
            f"{listed(problems, PROBLEMS)}")


def pair_advice(summary: Mapping[str, Any]) -> str:
    """The remedy for the most frequent reason for which pairs have no decided label."""
    agreement, bias = summary["order_agreement"], summary["position_bias"]
    main = next(iter(summary["outcomes"]), None)
    if main in ("undecided", "order") and agreement is not None and agreement < 0.5 and abs(bias) > 0.1:
        place = "first" if bias > 0 else "second"
        return (f"the judge prefers the answer shown {place}, whatever it says, and contradicts itself in the other order for "
                f"{1 - agreement:.0%} of the pairs; choose another judge or other templates (feedback.templates)")
    return advice(summary["outcomes"], COMPARISON)


MOST_FLIPS = 0.3
"""A judge is inconsistent if a larger share of its preferences changes when the answers are swapped."""


def audit_warnings(audit: Mapping[str, Any]) -> list[str]:
    """Sentences if a judge is not better than chance on gold pairs, or inconsistent. audit: `feedback.audit.Audit.to_dict`."""
    warnings, accuracy, flips = [], audit["accuracy"], audit["flips"]
    remedy = "choose a better judge, or other templates (feedback.templates)"
    if not accuracy["total"]:
        count = audit["pairs"] - audit["ties"]
        warnings.append(f"the judge decides none of the {count:,} gold pairs with a better answer; {remedy}")
    elif accuracy["low"] <= 0.5:
        worse = "is worse than chance" if accuracy["high"] < 0.5 else "may be chance"
        interval = f"95% interval {accuracy['low']:.0%} to {accuracy['high']:.0%}"
        warnings.append(f"the judge prefers the better answer in {accuracy['rate']:.0%} of the {accuracy['total']:,} gold "
                        f"pairs that it decides ({interval}), which {worse}; {remedy}")
    if flips["total"] and flips["rate"] > MOST_FLIPS:
        warnings.append(f"for {flips['rate']:.0%} of the gold pairs that the judge decides in both orders, it prefers the "
                        f"other answer when the answers are swapped, so it often decides by position; {remedy}")
    return warnings
