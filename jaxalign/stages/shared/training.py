"""The inputs of a stage's trainer, from the stage's context, and supervised training with its summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import BestOfNConfig, PretrainConfig, SFTConfig, to_dict
from jaxalign.config.results import REPEATED_CALLS
from jaxalign.data.windows import WindowedRows
from jaxalign.models.adapters.quantised import quantise_abstract
from jaxalign.models.model import Model, Params
from jaxalign.records import PackedBatch
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.stages.shared.manifest import fingerprint, read_manifest
from jaxalign.steps.checkpoint import save_params
from jaxalign.steps.loop import Loop
from jaxalign.tracking.metrics import read_metrics
from jaxalign.tracking.tracker import make_trackers
from jaxalign.trainers.extent import read_share
from jaxalign.trainers.inputs import TrainerInputs, peak_flops
from jaxalign.trainers.sft import SFT, held_out_loss


def stage_inputs(
    context: StageContext, model: Model, weights: Callable[[], Params], trained: Callable[[Params], Params],
    use: int = streams.STATE, **loop: Any,
) -> TrainerInputs:
    """The inputs of a trainer that works in the stage's directory. With adapters, the run's base is frozen.

    Args:
      weights: reads the weights; with adapters, joined with the base.
      trained: takes those weights and returns the part to train, in buffers that training may donate.
      use: selects the PRNG key kept in the training state.
      loop: fields of the loop's settings that are added to those set here, or override them.
    """
    settings = {"stage": context.title, "directory": context.directory, "began": context.began}
    settings |= {"peak": peak_flops(model), "profile": context.config.profile}
    manifest = read_manifest(context.directory)
    if manifest is not None:
        excluded = ("preference.on_failure", *REPEATED_CALLS)  # They may change; the other fields keep their first values.
        fields = {name: value for name, value in manifest.fields().items() if name not in excluded}
        place = (settings | loop)["directory"].relative_to(context.workdir)
        settings["run_id"] = fingerprint([str(place), fields])
    settings |= {"trackers": make_trackers(context.config.tracking.trackers), "settings": to_dict(context.config)}
    settings["settings"]["workdir"] = str(context.workdir)
    frozen = None
    if model.lora is not None:
        frozen = quantise_abstract(model.base.abstract(), context.config.lora.base)
    root = jax.random.fold_in(jax.random.key(context.stream_seed), streams.number_of(context.directory.name, streams.STAGES))
    return TrainerInputs(
        model,
        weights=weights,
        trained=trained,
        frozen=lambda: run_models.frozen_params(context, model),
        seed=context.stream_seed,
        key=jax.random.fold_in(root, use),
        root_key=root,
        loop=Loop(**settings | loop),
        abstract_frozen=frozen,
    )


def policy_inputs(context: StageContext, model: Model, shared: bool, **loop: Any) -> TrainerInputs:
    """The inputs of a trainer whose policy starts from this stage's starting weights.

    Args:
      shared: whether a reference also reads the weights, so that training needs a copy.
      loop: as in `stage_inputs`.
    """
    stage = context.directory.name
    return stage_inputs(
        context,
        model,
        weights=lambda: run_models.policy_params(context, model, stage),
        trained=lambda weights: run_models.trained_params(context, model, weights, stage, shared),
        **loop,
    )


def read_part(rows: int, batch: int, steps: int) -> dict[str, float]:
    """The share of the rows that training reads, for a summary; empty if it reads all."""
    share = read_share(rows, batch, steps)
    return {"read_share": share} if share < 1 else {}


def train_supervised(
    context: StageContext,
    section: PretrainConfig | SFTConfig | BestOfNConfig,
    inputs: TrainerInputs,
    train: PackedBatch | WindowedRows,
    held_out: PackedBatch | None,
    steps: int,
    extra: Callable[[], dict] = dict,
) -> None:
    """Trains for `steps` steps on packed rows, saves the trained parameters and writes the summary, including `extra()`."""
    trainer = SFT.from_inputs(inputs, section)
    stream = streams.number_of(context.directory.name, streams.LOADERS)
    for _ in trainer.fit_packed(train, steps, stream, context.config.model.load_balance_coef):
        pass
    save_params(context.directory / "params", trainer.params)
    rows = read_metrics(context.directory / "metrics.jsonl")
    summary = {"steps": steps, "tokens": int(sum(row["tokens"] for row in rows))}
    summary |= {"loss_first": rows[0]["loss"], "loss_last": float(np.mean([row["loss"] for row in rows[-10:]]))}
    if isinstance(train, PackedBatch):
        summary |= read_part(len(train.tokens), section.batch_rows, steps)
    summary["held_out_loss"] = None
    if held_out is not None:
        summary["held_out_loss"] = held_out_loss(inputs.model, trainer.weights, held_out, section.batch_rows)
    write_json(context.directory / "summary.json", summary | extra())
