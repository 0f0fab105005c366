"""Measures a directly optimised policy: log-probabilities of answers, the objective, and the accuracy of the reward."""

from __future__ import annotations

import numpy as np

from jaxalign.algorithms.statistics import wilson_interval
from jaxalign.config import DPOConfig
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerPairs
from jaxalign.registry.objectives import objectives_of
from jaxalign.steps.arguments import LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs
from jaxalign.steps.early_stopping import LOSS
from jaxalign.steps.objectives import DirectInputs, anchors, objective_loss
from jaxalign.trainers.answers import packed


def all_logprobs(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> np.ndarray:
    """float32 [B, 2]: the log-probability of every answer."""
    out, batch = [], section.batch
    for start in range(0, len(pairs.label), batch):
        index = np.minimum(np.arange(start, start + batch), len(pairs.label) - 1)
        own, parts = packed(section, model, pairs, index)
        arguments = LogprobArguments(model=model, params=params, pairs=own, packed=parts)
        out.append(fetch(answer_logprobs(arguments).logprobs))
    return np.concatenate(out)[: len(pairs.label)] if out else np.zeros((0, 2), np.float32)


def held_out_metrics(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict[str, float]:
    """held_out_loss and held_out_accuracy: the means of the objective's loss and accuracy over the rows, by their weights.

    An objective with an anchor computes it over all rows.
    """
    columns = *all_logprobs(section, model, params, pairs).T, *pairs.reference.T, *(pairs.length - pairs.prompt_length).T
    inputs = DirectInputs(*(np.asarray(x, np.float32) for x in columns), pairs.label, pairs.weight, np.float32(0), section)
    loss, reported = objective_loss(inputs, anchors(inputs))
    means = (float(np.average(np.asarray(x, np.float64), weights=pairs.weight)) for x in (loss, reported["accuracy"]))
    return dict(zip((LOSS, "held_out_accuracy"), means, strict=True))


def accuracy(section: DPOConfig, model: Model, params: Params, pairs: AnswerPairs) -> dict | None:
    """How often the implicit reward prefers the answer that the label prefers; None if no label prefers one.

    The implicit reward is the log-probability minus the reference's, per token for objectives with mean rewards.
    """
    leaning = pairs.label > 0.5
    if not leaning.any():
        return None
    reward = all_logprobs(section, model, params, pairs) - pairs.reference
    objectives = objectives_of(section.objective)
    if len(objectives) == 1 and objectives[0].mean_rewards:
        reward = reward / (pairs.length - pairs.prompt_length)
    reward = reward[leaning]
    right, total = int(np.sum(reward[:, 0] > reward[:, 1])), len(reward)
    low, high = wilson_interval(right, total)
    margin = float(np.mean(reward[:, 0] - reward[:, 1]) * section.beta)
    return {"pairs": total, "accuracy": right / total, "low": low, "high": high, "margin": margin}


def separation(section: DPOConfig, model: Model, params: Params, judged: AnswerPairs) -> dict | None:
    """Over all pairs of a good and a bad answer: how often the good one has the higher implicit reward (ties count one half),
    and the mean difference. None unless there are answers of both kinds."""
    good = judged.label > 0.5
    if not good.any() or good.all():
        return None
    reward = (all_logprobs(section, model, params, judged) - judged.reference)[:, 0]
    bad = np.sort(reward[~good])
    below = (np.searchsorted(bad, reward[good], "left") + np.searchsorted(bad, reward[good], "right")) / 2
    margin = float((np.mean(reward[good]) - np.mean(bad)) * section.beta)
    counts = {"desirable": int(good.sum()), "undesirable": len(bad)}
    return counts | {"accuracy": float(np.mean(below) / len(bad)), "margin": margin}
