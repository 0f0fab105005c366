"""Compares language models on the same prompts: `jaxalign.evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.errors import UserError
from jaxalign.models.language_model import LanguageModel
from jaxalign.records import Comparison, Prompt
from jaxalign.rewards.base import columns_of
from jaxalign.rewards.callables import call_reward
from jaxalign.rollout.generation import TextSampler
from jaxalign.trainers.judging import Judge
from jaxalign.trainers.rows import as_prompts


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What models answered, and how they compare.

    Attributes:
      prompts: the B prompts.
      answers: B texts of each model, by its name.
      complete: the share of each model's answers that ended before the length limit.
      measures: {measure: {model: mean over the answers that have a number}}.
      win_rates: for each pair of models what `won` returns, with "model" and "against"; empty without a judge.
    """

    prompts: tuple[Prompt, ...]
    answers: dict[str, list[str]]
    complete: dict[str, float]
    measures: dict[str, dict[str, float]]
    win_rates: list[dict[str, Any]]


def evaluate(
    models: LanguageModel | Mapping[str, LanguageModel], prompts: Any, *, measures: Mapping[str, Callable] | None = None,
    judge: Judge | None = None, temperature: float = 0.0, max_new_tokens: int = 64, batch: int = 32, seed: int = 0,
) -> Evaluation:  # fmt: skip
    """Lets each model answer the prompts, measures the answers, and compares every two models.

    Args:
      models: by name, in the order of their making; a model without a name is called "model".
      prompts: B texts, dialogues or `Prompt`s.
      measures: functions `(prompts, responses, **columns) -> B numbers`, such as a reward function, by name.
      judge: compares the answers of every two models; None: there are no win rates.
      temperature, max_new_tokens, batch, seed: of the answers. All models draw the same random numbers.

    Raises:
      UserError: there are no models or prompts, or a measure fails.
    """
    models = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise UserError("evaluate(models) is empty; at least one language model is expected")
    asked = as_prompts(prompts, "evaluate(prompts)")
    answers, complete = {}, {}
    for name, model in models.items():
        sampler = TextSampler(model, temperature=temperature, batch=batch, seed=seed)
        found = sampler.generate(asked, max_new_tokens)
        answers[name], complete[name] = found.texts, float(np.mean(found.ended))
    measured = {
        measure: {name: _mean(measure, fn, asked, texts) for name, texts in answers.items()}
        for measure, fn in (measures or {}).items()
    }
    wins = []
    for later, earlier in () if judge is None else contests(list(models)):
        compared = judge.compare(asked, answers[later], answers[earlier])
        wins.append({"model": later, "against": earlier} | won(compared))
    return Evaluation(tuple(asked), answers, complete, measured, wins)


def contests(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every (later, earlier) pair of names."""
    return [(later, names[i]) for j, later in enumerate(names) for i in range(j)]


def won(labelled: Sequence[Comparison]) -> dict[str, Any]:
    """How often the first response won. A tie or an undecided pair counts half.

    Returns:
      wins, total, undecided (ties included), rate, and the bounds low and high of its Wilson 95% interval.
    """
    different = [c for c in labelled if c.response_a != c.response_b and c.decided]
    wins, ties = sum(c.label > 0.5 for c in different), len(labelled) - len(different)
    low, high = wilson_interval(wins + ties / 2, len(labelled))
    share = (wins + ties / 2) / len(labelled)
    return {"wins": wins, "total": len(labelled), "undecided": ties, "rate": share, "low": low, "high": high}


def rate(values: Sequence[bool]) -> dict[str, Any]:
    """Count, total and share of true values, with the bounds low and high of its Wilson 95% interval."""
    count, total = int(sum(values)), len(values)
    low, high = wilson_interval(count, total)
    return {"count": count, "total": total, "rate": count / total if total else 0.0, "low": low, "high": high}


def _mean(measure: str, fn: Callable, prompts: Sequence[Prompt], texts: Sequence[str]) -> float:
    dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in prompts]
    values, kept, report = call_reward(fn, dialogues, texts, columns_of(prompts), 0, None)
    if not kept.any():
        raise UserError(f"measure {measure!r} has no number for any of {len(texts)} answers ({report.first_error})")
    return float(np.mean(values[kept]))
