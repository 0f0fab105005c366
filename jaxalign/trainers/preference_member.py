"""Trains one preference model on arrays of pairs, and joins the members of an ensemble into one scorer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxalign import streams
from jaxalign.algorithms.rewards import score_statistics
from jaxalign.config import PreferenceConfig
from jaxalign.data.loader import EpochLoader, InOrder
from jaxalign.data.windows import WindowedRows
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model, Params, scalar_from_lm
from jaxalign.parallel.rows import fetch
from jaxalign.records import PairBatch
from jaxalign.rewards.scorer import Ensemble, Scorer
from jaxalign.steps.arguments import PreferenceArguments
from jaxalign.steps.early_stopping import EarlyStopping
from jaxalign.steps.loop import Step
from jaxalign.steps.preference_step import preference_step
from jaxalign.trainers.base import Trainer
from jaxalign.trainers.inputs import TrainerInputs
from jaxalign.trainers.preference_quality import accuracy, held_out_metrics
from jaxalign.trainers.scoring import all_scores, packed


class MemberRows(NamedTuple):
    """The pairs of a member.

    Attributes:
      rows: all pairs, numpy arrays; or the pairs of windows.
      loader: selects the pairs of each batch.
      steps: the number of steps.
      epoch: the number of steps of an epoch.
    """

    rows: PairBatch | WindowedRows
    loader: EpochLoader | InOrder
    steps: int
    epoch: int


class PreferenceMember(Trainer):
    """Trains one preference model on arrays of pairs: a `RewardModel`, or a member of its ensemble."""

    name = "RewardModel"

    _evaluation: EarlyStopping | None = None

    def fit(self, pairs: MemberRows) -> Iterator[Step]:
        """Trains and yields each step."""
        model, section = self.inputs.model, self.section

        def arguments(frozen: Params | None, index: np.ndarray) -> PreferenceArguments:
            batch, parts = packed(model, pairs.rows, index, section.micro_batch_tokens)
            return PreferenceArguments(
                model=model,
                optimizer=self.optimizer,
                centering_coef=section.centering_coef,
                batch=batch,
                frozen=frozen,
                packed=parts,
            )

        return self._train(
            preference_step, arguments, pairs.rows, pairs.loader, total_steps=pairs.steps, shown=("loss", "accuracy"),
            stopping=self._evaluation,
        )

    def stopped(self) -> dict[str, Any]:
        """The result of early stopping, after training: the number of steps trained, and the best step with its loss."""
        state = self.training.state
        step, loss = fetch((state.best_step, state.best_loss))
        return {"steps": self.training.completed, "best_step": int(step), "held_out_loss": float(loss)}

    def evaluates(self, held_out: PairBatch | None, eval_every: int, patience: int | None, epoch: int) -> None:
        """Sets the pairs that `fit` measures, and when.

        Args:
          held_out: the pairs; None for no pairs.
          eval_every, patience: see `RewardModel.fit`.
          epoch: the number of steps of an epoch.

        Raises:
          UserError: no pair can measure the loss.
        """
        section, scorer = self.section, Scorer(self.inputs.model)
        if held_out is not None and not np.any((np.abs(held_out.label - 0.5) > 1e-6) & (held_out.weight > 0)):
            raise UserError("none of the held-out pairs that would measure the loss has a label that prefers an answer; give "
                            "more pairs or, with early_stopping, raise held_out_share or set early_stopping to False")

        def measure(params: Params, completed: int) -> dict[str, float]:
            del completed
            return held_out_metrics(all_scores(scorer, join(self.frozen, params), held_out, section.batch), held_out)

        if section.early_stopping:
            eval_every, patience = eval_every or section.eval_every, section.patience if patience is None else patience
        self._evaluation = self._held_out(held_out, eval_every, patience, measure, epoch)


def with_random_head(inputs: TrainerInputs, number: int) -> TrainerInputs:
    """The inputs of a policy's trunk, or of its adapters, with the random scalar head of ensemble member `number`."""
    model = inputs.model.with_head("scalar")

    def trained(weights: Params) -> Params:
        key = jax.random.fold_in(inputs.root_key, streams.member_head(number))
        if model.lora is None:
            return scalar_from_lm(inputs.trained(weights), model.init(key))
        return {**inputs.trained(weights), "score": model.random_score(key)}

    return dataclasses.replace(inputs, model=model, trained=trained)


def make_ensemble(
    section: PreferenceConfig, model: Model, members: Sequence[Params], train: PairBatch, held_out: PairBatch | None = None
) -> tuple[Scorer, dict]:
    """(the scorer of an ensemble, its part of the summary).

    With `normalise`, each member's scores are shifted and scaled on the answers of the training pairs to mean 0 and to the
    standard deviation that the members have on average, so that score differences stay in nats. `disagreement` is the standard
    deviation across members of a held-out answer's score, averaged over answers and divided by that same average standard
    deviation; None without held-out pairs.
    """
    single = Scorer(model)
    statistics = [score_statistics(all_scores(single, params, train, section.batch).reshape(-1)) for params in members]
    shift, scale = (np.asarray(column, np.float64) for column in zip(*statistics, strict=True))
    unit = float(scale.mean())
    if not section.normalise:
        shift, scale = np.zeros_like(shift), np.full_like(scale, unit)
    ensemble = Ensemble(
        tuple(float(x) for x in shift), tuple(float(x) for x in scale / unit), section.combine, section.std_weight
    )
    if held_out is None:
        return Scorer(model, ensemble=ensemble), {}
    scores = np.stack([all_scores(single, params, held_out, section.batch) for params in members])
    apart = np.asarray(ensemble.normalised(scores.reshape(len(members), -1))).std(axis=0)
    rows = [
        {"shift": a, "scale": b, "held_out": accuracy(row, held_out.label)}
        for a, b, row in zip(ensemble.shift, ensemble.scale, scores, strict=True)
    ]
    summary = {"members": rows, "combine": section.combine, "std_weight": section.std_weight}
    summary["disagreement"] = float(apart.mean() / unit) if apart.size else None
    return Scorer(model, ensemble=ensemble), summary
