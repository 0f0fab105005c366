"""Sets up trainers for stages: weights, keys and loops from the stage's context, and the summary of supervised training."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from jaxalign import streams
from jaxalign.config import BestOfN, Pretrain, Sft
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.model import Model, Params
from jaxalign.records import PackedBatch
from jaxalign.stages.shared import loops, run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.keys import stage_key
from jaxalign.tracking.metrics import read_metrics
from jaxalign.trainers.fitting import RunSettings, Start
from jaxalign.trainers.sft import Supervised, held_out_loss
from jaxalign.training.checkpoint import save_params


def run_settings(context: StageContext, model: Model, use: int | str = streams.STATE) -> RunSettings:
    """The settings of a training run in the stage's directory. use: selects the PRNG key kept in the training state."""
    return RunSettings(
        seed=context.stream_seed,
        key=stage_key(context, context.directory.name, use),
        loop=functools.partial(loops.loop, context, model),
        directory=context.directory,
        timing=lambda: loops.timing(context, model),
    )


def start_from(
    context: StageContext, model: Model, weights: Callable[[], Params], trained: Callable[[Params], Params]
) -> Start:
    """The start of training `model`, whose weights are read later. With adapters, the run's base is frozen.

    Args:
      weights: reads the weights; with adapters, joined with the base.
      trained: takes those weights and returns the part to train, in buffers that training may donate.
    """
    frozen = None
    if model.lora is not None:
        frozen = quantise_abstract(model.base.abstract(), context.config.lora.base)
    return Start(model, weights, trained, lambda: run_models.frozen_params(context, model), frozen)


def policy_start(context: StageContext, model: Model, shared: bool) -> Start:
    """The start of training a policy from this stage's starting weights.

    Args:
      shared: whether a reference also reads the weights, so that training needs a copy.
    """
    stage = context.directory.name
    return start_from(
        context,
        model,
        weights=lambda: run_models.policy_params(context, model, stage),
        trained=lambda weights: run_models.trained_params(context, model, weights, stage, shared),
    )


def train_supervised(
    context: StageContext,
    section: Pretrain | Sft | BestOfN,
    start: Start,
    train: PackedBatch,
    held_out: PackedBatch | None,
    steps: int,
    extra: dict | None = None,
) -> None:
    """Trains for `steps` steps on packed rows, saves the trained parameters and writes the summary, including `extra`."""
    stage, model = context.directory.name, start.model
    supervised = Supervised(
        start,
        section,
        run_settings(context, model),
        train,
        streams.loader_stream(stage),
        context.config.model.load_balance_coef,
    )
    for _ in supervised.steps(steps):
        pass
    save_params(context.directory / "params", supervised.fit.params)
    rows = read_metrics(context.directory / "metrics.jsonl")
    summary = {"steps": steps, "tokens": int(sum(row["tokens"] for row in rows))}
    summary |= {"loss_first": rows[0]["loss"], "loss_last": float(np.mean([row["loss"] for row in rows[-10:]]))}
    summary["held_out_loss"] = None
    if held_out is not None:
        summary["held_out_loss"] = held_out_loss(model, supervised.fit.weights, held_out, section.batch_rows)
    write_json(context.directory / "summary.json", summary | (extra or {}))
