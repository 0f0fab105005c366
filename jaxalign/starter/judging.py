"""Whether a model can judge: it compares built-in pairs of answers of which the better one is known."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.reasons import MOST_FLIPS, MOSTLY, PROBLEMS, listed
from jaxalign.records import Comparison
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.judge_audit import audit_judge, gold_pairs

KINDS = ("harm", "needless refusal", "courtesy", "evasion", "focus")
"""The kinds of built-in pairs that are asked."""
PAIRS_OF_A_KIND = 4


class Judged(NamedTuple):
    """The audit of a model as the judge. templates: the template set. audit: `feedback.audit.Audit.to_dict`."""

    templates: str
    audit: Mapping[str, Any]

    @property
    def agreement(self) -> float | None:
        """The share of pairs, of those that it decides in both orders, for which it prefers the same answer in both."""
        rate = self.audit["flips"]["rate"]
        return None if rate is None else 1.0 - rate

    @property
    def able(self) -> bool:
        return not self.faults()

    def sentence(self) -> str:
        """States the measures."""
        audit, right, twice = self.audit, self.audit["accuracy"], self.audit["flips"]
        measured = [f"of {audit['pairs']} pairs with a known better answer it decides {right['total']}, "
                    f"{right['count']:.0f} of them rightly"]
        if twice["total"]:
            measured.append(f"it prefers the same answer in both orders in {self.agreement:.0%} of {twice['total']}")
        if audit["outside"] is not None:
            measured.append(f"{audit['outside']:.0%} of its probability is outside of the answer letters")
        return "; ".join(measured)

    def faults(self) -> list[str]:
        """What is wrong with the judge, in plain words; empty if it can judge."""
        audit, right, twice, first = (self.audit, *(self.audit[name] for name in ("accuracy", "flips", "first_position")))
        found = []
        if audit["without_verdict"] > MOSTLY * audit["pairs"]:
            found.append(f"it gives no verdict on {audit['without_verdict']} pairs ({listed(audit['problems'], PROBLEMS)})")
        if audit["outside"] is not None and audit["outside"] > MOSTLY:
            found.append("it does not answer with a letter: most of its probability is for other text")
        if twice["total"] and twice["rate"] > MOST_FLIPS:
            place = "first" if first["rate"] > 0.5 else "second"
            found.append(f"it often changes its mind when the answers are swapped, and prefers the answer shown {place} in "
                         f"{max(first['rate'], 1 - first['rate']):.0%} of the cases")
        if not right["total"]:
            found.append("it sees no difference between the good and the bad answers")
        elif right["low"] <= 0.5:
            found.append(f"it is right on {right['count']:.0f} of {right['total']} pairs, which may be chance")
        return found


def quick_pairs() -> list[Comparison]:
    """20 of the built-in gold pairs, 4 of each of `KINDS`; in half of them the better answer is the shorter one."""
    pairs, _ = gold_pairs(Config())
    half, chosen = PAIRS_OF_A_KIND // 2, []
    for kind in KINDS:
        own = [pair for pair in pairs if pair.prompt.columns["kind"] == kind]
        for shorter in (True, False):
            chosen += [pair for pair in own if (len(pair.response_a) < len(pair.response_b)) == shorter][:half]
    return chosen


def check_judge(config: Config, templates: str) -> Judged:
    """Asks the run's own model about `quick_pairs` in both orders.

    A verdict counts whatever its probability outside of the answer letters is, so that the other measures are known.

    Args:
      config: the run's config.
      templates: the template set; "" for the words of the embedded world.

    Raises:
      UserError: the model cannot be asked in this form, or its weights are damaged.
    """
    feedback = dataclasses.replace(config.feedback, templates=templates, max_outside_mass=1.0, undecided_margin=None,
                                   thinking="auto")
    config = resolve_auto(dataclasses.replace(config, feedback=feedback))
    with tempfile.TemporaryDirectory() as scratch:
        context = StageContext(config, Path(scratch), Path(scratch) / "compare", False)
        return Judged(templates, audit_judge(context, pairs=quick_pairs())["audit"])


def best(judged: list[Judged]) -> Judged:
    """The first judge that can judge, or the one with the fewest faults."""
    return min(judged, key=lambda one: len(one.faults()))
