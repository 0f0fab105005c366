"""Next-token training as pretrain and sft share it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import BestOfN, Pretrain, Sft
from jaxalign.data.loader import EpochLoader, take
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model, Params
from jaxalign.parallel.ahead import Ahead
from jaxalign.parallel.rows import place_rows
from jaxalign.records import PackedBatch
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import StageContext, write_json
from jaxalign.tracking.metrics import read_metrics
from jaxalign.training.checkpoint import save_params
from jaxalign.training.lm_step import lm_evaluate, lm_step
from jaxalign.training.microbatch import chosen
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.state import abstract_state, init_state
from jaxalign.training.work import learning_packed


def train_lm(
    context: StageContext,
    section: Pretrain | Sft | BestOfN,
    model: Model,
    train: PackedBatch,
    held_out: PackedBatch | None,
    steps: int,
    init: Callable[[], Params],
    extra: dict | None = None,
):
    """Trains `steps` steps on the packed rows, saves what was trained and writes the summary (with `extra` in it).

    init: makes the parameters that are trained, which a run that goes on does without.
    """
    stage = context.directory.name
    optimizer = make_optimizer(section.optimizer, steps)
    loader = EpochLoader(len(train.tokens), section.batch_rows, context.config.seed, streams.loader_stream(stage))
    key = common.stage_key(context.config, stage)

    parts = chosen(section.micro_batches, section.batch_rows, train.tokens.shape[1], model.sharding)

    def arguments(state, frozen, step: int):
        batch = place(model, train, loader.indices(step))
        return model, optimizer, parts, state, batch, frozen, context.config.model.load_balance_coef

    loop = common.loop(
        context, model, steps, section.checkpoint_every,
        flops=lambda step: learning_packed(model, take(train, loader.indices(step))),
    )  # fmt: skip
    with Ahead() as ahead:
        ahead.add(lm_step, lambda: arguments(*common.abstract_training(context.config, model, optimizer), 0))
        frozen = common.frozen_params(context, model)
        state = loop.run(
            lambda: init_state(model, optimizer, init(), key), abstract_state(model, optimizer),
            lambda state, step: lm_step(*arguments(state, frozen, step)),
        )  # fmt: skip
    save_params(context.directory / "params", state.params)
    rows = read_metrics(context.directory / "metrics.jsonl")
    summary = {"steps": steps, "tokens": int(sum(row["tokens"] for row in rows))}
    summary |= {"loss_first": rows[0]["loss"], "loss_last": float(np.mean([row["loss"] for row in rows[-10:]]))}
    summary["held_out_loss"] = None if held_out is None else held_out_loss(
        model, join(frozen, state.params), held_out, section.batch_rows
    )
    write_json(context.directory / "summary.json", summary | (extra or {}))


def held_out_loss(model: Model, params, rows: PackedBatch, batch: int) -> float:
    """Mean negative log-likelihood, nats a token, over all rows."""
    loss = tokens = 0.0
    for start in range(0, len(rows.tokens), batch):
        part = take(rows, slice(start, start + batch))
        short = batch - len(part.tokens)
        part = jax.tree.map(lambda x: np.pad(x, ((0, short), (0, 0))), part)  # noqa: B023
        part_loss, part_tokens = lm_evaluate(model, params, place(model, part))
        loss, tokens = loss + float(part_loss), tokens + float(part_tokens)
    return loss / max(tokens, 1.0)


def place(model: Model, batch, index: np.ndarray | None = None):
    """Puts a batch, or rows `index` of it, on the model's devices, its leading axis split over the mesh."""
    return place_rows(model.sharding, batch, index)
