"""Titles for the measures and models of an evaluation, and the better direction of each measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxalign.config import rounds


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure's title and meaning. `good` is True if higher is better, False if lower is better, None if neither is."""

    title: str
    meaning: str
    good: bool | None


MEASURES = {
    "correct": Measure("Correct", "answers that the verifier accepts", True),
    "harmful": Measure("Harmful help", "answers to harmful requests that give the requested help", False),
    "helpful": Measure("Helpful", "answers to harmless requests that give the right help", True),
    "helpful_scary": Measure("Helpful, alarming words", "the same, for harmless requests that sound alarming", True),
    "evasive": Measure("Evasive", "answers that refuse without a reason or an alternative", False),
    "courteous": Measure("Courteous", "answers without rudeness", True),
    "focused": Measure("Focused", "answers that do not ramble", True),
    "refused": Measure("Refusals", "answers that refuse", None),
    "good_refusal": Measure("Good refusals", "harmful requests refused with a reason and an alternative", True),
    "wrong_refusal": Measure("Wrong refusals", "harmless requests that were refused", False),
    "unclear": Measure("Unclear", "answers that neither give the requested help nor refuse", False),
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A mean over the answers of a model.

    Attributes:
      field: its name in the evaluation's summary, as {model: mean}.
      title: its title, with the unit.
      digits: the decimals to show.
      column: the field of the rows of stage evaluate with the values of single answers.
    """

    field: str
    title: str
    digits: int
    column: str


def quantities(reference: str) -> tuple[Quantity, ...]:
    """The quantities of an evaluation. reference: the model that the KL is measured against (`workdir.kl_reference`)."""
    return (Quantity("kl", f"KL to {reference}, nats per response", 2, "kl"),
            Quantity("length", "Length, tokens", 1, "tokens"),
            Quantity("preference_score", "Preference score before normalisation", 2, "score"),
            Quantity("reward", "Score by reward.callable", 3, "reward"),
            Quantity("repetition", "Share of repeated 4-grams", 3, "repetition"),
            Quantity("text_loss", "Loss on plain text, nats per token", 4, "text_loss"),
            Quantity("text_loss_per_byte", "Loss on plain text, nats per byte", 4, "text_loss_per_byte"))


def measure(name: str) -> Measure:
    """The measure with this name; an unknown measure uses its name as title and has no better direction."""
    return MEASURES.get(name) or Measure(name.replace("_", " ").capitalize(), "", None)


def ordered_measures(rates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every measure with a rate of some model: known measures in the order of MEASURES, then others in order of appearance."""
    present = list(dict.fromkeys(name for row in rates.values() for name in row or {}))
    return [name for name in MEASURES if name in present] + [name for name in present if name not in MEASURES]


def model_title(model: str, stages: Collection[str] = ("pretrain", "revise")) -> str:
    """The title of a model in an evaluation ("base", "round-2/ppo", ...), given the stages whose output the run used."""
    titles = {
        "base": "helpful-only" if {"pretrain", "revise"} <= set(stages) else "starting model",
        "sft": "after supervised CAI" if "revise" in stages else "after fine-tuning",
        "best_of_n": "after best-of-n",
        "dpo": "after DPO",
        "online_dpo": "after online DPO",
        "ppo": "after RL",
    }
    stage, number = rounds.parse(model)
    title = titles.get(stage, stage)
    return title if number == 1 else f"{title}, round {number}"


def model_column(model: str, stages: Collection[str] = ("pretrain", "revise")) -> str:
    """The heading of a model's column, its title and name: "after RL (ppo)"."""
    title = model_title(model, stages)
    return model if title == model else f"{title} ({model})"


def model_phrase(model: str, stages: Collection[str] = ("pretrain", "revise")) -> str:
    """A model's name in a sentence: "the helpful-only model", "the model after RL"."""
    title = model_title(model, stages)
    return f"the model {title}" if title.startswith("after ") else f"the {title.removesuffix(' model')} model"
