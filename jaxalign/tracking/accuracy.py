"""Sentences on the held-out accuracy of the preference model and of the implicit reward of stage dpo.

The stages print them, and the report shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def accuracy_sentence(summary: Mapping[str, Any]) -> str | None:
    """Compares the held-out accuracy of stage preference with its baselines; None if no held-out pair has a decided label."""
    held_out, baselines = summary["held_out"], summary["baselines"]
    if held_out is None:
        return None
    length, ceiling = baselines["length"], baselines["ceiling"]
    most = "" if ceiling is None else f"; the noise of the labels allows an expected {ceiling:.1%}"
    return (f"held-out accuracy {_with_interval(held_out)} on {held_out['pairs']:,} pairs; the rule that the {length['rule']} "
            f"answer is better reaches {_with_interval(length)}, chance 50.0%{most}")


def human_sentence(summary: Mapping[str, Any]) -> str | None:
    """The numbers and accuracies of the AI-labelled and human pairs of stage preference; None without human files."""
    if "human" not in summary:
        return None
    said = []
    for name, kind in (("AI-labelled", "ai"), ("human", "human")):
        part = summary[kind]
        measured = "accuracy unknown" if part["held_out"] is None else f"accuracy {_with_interval(part['held_out'])}"
        said.append(f"{part['train_pairs']:,} {name} pairs to train on and {part['held_out_pairs']:,} held out, {measured}")
    return f"{'; '.join(said)}; the weight of a human pair is {summary['human']['weight']:g}"


def _with_interval(rate: Mapping[str, Any]) -> str:
    return f"{rate['accuracy']:.1%} (95% interval {rate['low']:.1%} to {rate['high']:.1%})"


def uninformative(summary: Mapping[str, Any]) -> str | None:
    """A sentence with a remedy if the interval of the preference model's accuracy does not exceed the best baseline."""
    held_out = summary["held_out"]
    if held_out is None:
        return ("the accuracy of the preference model is unknown, because no held-out pair has a label that prefers an answer; "
                "give more pairs, or raise held_out_share")
    name, best, length = "chance", 0.5, (summary.get("baselines") or {}).get("length")
    if length and length["accuracy"] > best:
        name, best = f"the rule that the {length['rule']} answer is better", length["accuracy"]
    if held_out["low"] > best:
        return None
    return (f"the preference model is not reliably better than {name}, which reaches {best:.1%}: its held-out accuracy is "
            f"{_with_interval(held_out)} on {held_out['pairs']:,} pairs; {_more_pairs(held_out, best, 'preference')}")


def unlearnt(summary: Mapping[str, Any]) -> str | None:
    """A sentence with a remedy if the interval of the held-out accuracy of stage dpo does not exceed chance.

    Args:
      summary: that of stage dpo. That of judged single answers has no interval, and no sentence follows from it.
    """
    held_out = summary.get("held_out")
    if "balance" in summary or (held_out is not None and "low" not in held_out):
        return None
    if held_out is None:
        return ("the accuracy of the implicit reward is unknown, because no held-out pair has a label that prefers an answer; "
                "give more pairs, or raise held_out_share")
    if held_out["low"] > 0.5:
        return None
    return (f"the implicit reward is not reliably better than chance: its held-out accuracy is {_with_interval(held_out)} on "
            f"{held_out['pairs']:,} pairs; {_more_pairs(held_out, 0.5, 'dpo')}")


def _more_pairs(held_out: Mapping[str, Any], best: float, section: str) -> str:
    """The remedy for a held-out accuracy that does not reliably exceed `best`. section: the name of the stage's section."""
    if held_out["accuracy"] > best:
        return "hold out more pairs for a narrower interval, or give more pairs to train on"
    return f"give more pairs to train on, train for more epochs ({section}.epochs), or correct the labels"
