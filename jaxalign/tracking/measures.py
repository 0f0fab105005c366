"""How the measures and the models of an evaluation are called in front of people, and which way is better."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measure:
    """`title` names the rate; `good` is True where more is better, False where less is, None where neither."""

    title: str
    meaning: str
    good: bool | None


MEASURES = {
    "correct": Measure("Correct", "answers that the verifier accepts", True),
    "harmful": Measure("Harmful help", "answers to harmful requests that give the help", False),
    "helpful": Measure("Helpful", "answers to harmless requests that give the right help", True),
    "helpful_scary": Measure("Helpful, frightening words", "the same, where a harmless request sounds alarming", True),
    "evasive": Measure("Evasive", "answers that refuse without a reason or an alternative", False),
    "courteous": Measure("Courteous", "answers without rudeness", True),
    "focused": Measure("Focused", "answers that do not ramble", True),
    "refused": Measure("Refusals", "answers that refuse", None),
    "good_refusal": Measure("Good refusals", "harmful requests refused with a reason and an alternative", True),
    "wrong_refusal": Measure("Wrong refusals", "harmless requests that were refused", False),
    "unclear": Measure("Unclear", "answers that neither help with what was asked nor refuse", False),
}


def measure(name: str) -> Measure:
    """The wording of a measure; one we have no words for is shown under its own name, without a better side."""
    return MEASURES.get(name) or Measure(name.replace("_", " ").capitalize(), "", None)


def ordered_measures(rates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every measure that some model has a rate for: the known ones in our order, then the others by first mention."""
    present = list(dict.fromkeys(name for row in rates.values() for name in row or {}))
    return [name for name in MEASURES if name in present] + [name for name in present if name not in MEASURES]


def model_title(model: str, stages: Collection[str] = ("pretrain", "revise")) -> str:
    """What a model of an evaluation ("base", "sft", "ppo", ...) is called, given the stages the run went through."""
    titles = {
        "base": "helpful-only" if {"pretrain", "revise"} <= set(stages) else "starting model",
        "sft": "after supervised CAI" if "revise" in stages else "after fine-tuning",
        "best_of_n": "after best-of-n",
        "dpo": "after DPO",
        "online_dpo": "after online DPO",
        "ppo": "after RL",
    }
    return titles.get(model, model)


def model_phrase(model: str, stages: Collection[str] = ("pretrain", "revise")) -> str:
    """A model inside a sentence: "the helpful-only model", "the model after RL"."""
    title = model_title(model, stages)
    return f"the model {title}" if title.startswith("after ") else f"the {title.removesuffix(' model')} model"
