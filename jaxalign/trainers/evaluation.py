"""Compares language models on the same prompts: `jaxalign.evaluate`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config.arguments import as_name, instance_of
from jaxalign.errors import UserError
from jaxalign.feedback.critique import count_outcomes
from jaxalign.models.language_model import LanguageModel
from jaxalign.reasons import verdict_warning
from jaxalign.records import Comparison, Prompt
from jaxalign.rewards.base import columns_of
from jaxalign.rewards.callables import call_reward, details
from jaxalign.rollout.generation import Sampler
from jaxalign.trainers.judging import Judge
from jaxalign.trainers.rows import as_prompts, require_equal_columns


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The answers of several models to the same prompts, with measures and win rates.

    Attributes:
      prompts: the B prompts.
      answers: each model's B texts, by model name.
      complete: the share of each model's answers that ended before the length limit.
      measures: {measure: {model: mean over the answers for which the measure has a number}}.
      win_rates: for each pair of models the result of `won`, with "model" and "against"; empty without a judge.
    """

    prompts: tuple[Prompt, ...]
    answers: dict[str, list[str]]
    complete: dict[str, float]
    measures: dict[str, dict[str, float]]
    win_rates: list[dict[str, Any]]


def evaluate(
    models: LanguageModel | Mapping[str, LanguageModel], prompts: Any, *, measures: Mapping[str, Callable] | None = None,
    judge: Judge | None = None, temperature: float = 0.0, max_new_tokens: int = 64, batch: int = 32, seed: int = 0,
) -> Evaluation:
    """Samples each model's answers to the prompts, measures them, and compares every pair of models.

    Args:
      models: the models by name, earlier models first; a single model is called "model".
      prompts: B texts, dialogues or `Prompt`s.
      measures: functions `(prompts, responses, **columns) -> B numbers` by name, such as a reward function.
      judge: compares the answers of every pair of models; None for no win rates.
      temperature, max_new_tokens, batch, seed: sampling settings. All models draw the same random numbers.

    Raises:
      UserError: there are no models or prompts, or a measure fails.
    """
    models = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not models:
        raise UserError("evaluate(models) is empty; at least one language model is expected")
    for name, model in models.items():
        as_name(name, "a name in evaluate(models)")
        instance_of(model, LanguageModel, f"evaluate(models)[{name!r}]", "a language model from load_model")
    measures = {} if measures is None else measures
    instance_of(measures, Mapping, "evaluate(measures)", "a mapping from names to functions")
    for name, fn in measures.items():
        as_name(name, "a name in evaluate(measures)")
        instance_of(fn, Callable, f"evaluate(measures)[{name!r}]", "a function (prompts, responses, **columns) -> numbers")
    instance_of(judge, Judge | None, "evaluate(judge)", "a jaxalign.Judge or None")
    asked = as_prompts(prompts, "evaluate(prompts)")
    require_equal_columns(asked, "evaluate(prompts)")
    answers, complete, given = {}, {}, {}
    for name, model in models.items():
        sampler = Sampler(model, temperature=temperature, batch=batch, seed=seed)
        samples = sampler.generate(asked, max_new_tokens)
        answers[name], complete[name] = samples.texts, float(np.mean(samples.ended))
        given[name] = details(model.tokenizer, samples.ids, samples.ended)
    dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in asked]
    measured, wins = {measure: {} for measure in measures}, []
    for measure, fn in measures.items():
        for name, texts in answers.items():
            values, kept, report = call_reward(fn, dialogues, texts, columns_of(asked), 0, None, details=given[name])
            values = values.sum(axis=1) if values.ndim == 2 else values
            if not kept.any():
                raise UserError(f"measure {measure!r} has no number for any of the {len(texts)} answers "
                                f"({report.first_error})") from report.cause
            measured[measure][name] = float(np.mean(values[kept]))
    for later, earlier in () if judge is None else contests(list(models)):
        wins.append({"model": later, "against": earlier} | won(judge.compare(asked, answers[later], answers[earlier])))
        if warning := verdict_warning(wins[-1], f"{later} and {earlier}"):
            logging.getLogger("jaxalign").warning("evaluate: %s", warning)
    return Evaluation(tuple(asked), answers, complete, measured, wins)


def contests(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every (later, earlier) pair of names."""
    return [(later, names[i]) for j, later in enumerate(names) for i in range(j)]


def won(labelled: Sequence[Comparison]) -> dict[str, Any]:
    """How often the first response won. A tie or an undecided pair counts one half.

    Returns:
      wins, total, undecided (including ties), rate, low and high, the bounds of its 95% Wilson interval, and outcomes: the
      number of undecided pairs by reason (`reasons.COMPARISON`).
    """
    different = [c for c in labelled if c.response_a != c.response_b and c.decided]
    wins, ties = sum(c.label > 0.5 for c in different), len(labelled) - len(different)
    low, high = wilson_interval(wins + ties / 2, len(labelled))
    share = (wins + ties / 2) / len(labelled)
    counts = {"wins": wins, "total": len(labelled), "undecided": ties}
    return counts | {"rate": share, "low": low, "high": high, "outcomes": count_outcomes(c.outcome for c in labelled)}


def rate(values: Sequence[bool]) -> dict[str, Any]:
    """count, total and rate of true values, with low and high, the bounds of the rate's 95% Wilson interval."""
    count, total = int(sum(values)), len(values)
    low, high = wilson_interval(count, total)
    return {"count": count, "total": total, "rate": count / total if total else 0.0, "low": low, "high": high}
