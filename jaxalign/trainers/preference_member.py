"""Trains one preference model on arrays of pairs, with optional early stopping on held-out pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxalign.data.loader import EpochLoader, take
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import fetch
from jaxalign.records import PairBatch
from jaxalign.rewards.scorer import Scorer
from jaxalign.trainers.base import StepProgram, Trainer
from jaxalign.trainers.preference_quality import held_out_metrics, measurable
from jaxalign.trainers.scoring import all_scores, packed
from jaxalign.training.arguments import PreferenceArguments
from jaxalign.training.early_stopping import EarlyStopping
from jaxalign.training.loop import Step
from jaxalign.training.preference_step import preference_step
from jaxalign.training.work import learning_pairs


class PreferenceMember(Trainer):
    """Trains one preference model on arrays of pairs: a `RewardModel`, or a member of its ensemble."""

    name = "RewardModel"

    def fit(self, train: PairBatch, loader: EpochLoader, held_out: PairBatch | None = None) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          train: the pairs, numpy arrays.
          loader: selects the pairs of each batch.
          held_out: the pairs on which early stopping measures the loss; not read without early stopping.

        Raises:
          UserError: early stopping has no pair to measure the loss on.
        """
        model, section = self.inputs.model, self.section

        def arguments(frozen: Params | None, number: int) -> PreferenceArguments:
            batch, parts = packed(model, train, loader.indices(number), section.micro_batch_tokens)
            return PreferenceArguments(
                model=model,
                optimizer=self.optimizer,
                centering_coef=section.centering_coef,
                batch=batch,
                frozen=frozen,
                packed=parts,
            )

        def flops(number: int) -> float:
            return learning_pairs(model, take(train, loader.indices(number)))

        def tokens(number: int) -> int:
            return int(train.length[loader.indices(number)].sum())

        program = StepProgram(preference_step, arguments, flops, tokens, shown=("loss", "accuracy"))
        stopping = self._stopping(held_out, loader.steps(1)) if section.early_stopping else None
        return self._train(program, loader.steps(section.epochs), stopping=stopping)

    def stopped(self) -> dict[str, Any]:
        """The result of early stopping, after training: the number of steps trained, and the best step with its loss."""
        state = self.training.state
        step, loss = fetch((state.best_step, state.best_loss))
        return {"steps": self.training.completed, "best_step": int(step), "held_out_loss": float(loss)}

    def _stopping(self, held_out: PairBatch | None, epoch: int) -> EarlyStopping:
        """Early stopping on held-out pairs. epoch: the number of steps of an epoch."""
        if not measurable(held_out):
            raise UserError("early_stopping is True, but none of the held-out pairs that would measure the loss has a label "
                            "that prefers an answer; give more pairs, raise held_out_share, or set early_stopping to False")
        section, scorer = self.section, Scorer(self.inputs.model)

        def measure(params: Params) -> dict[str, float]:
            scores = all_scores(scorer, join(self.frozen, params), held_out, section.batch)
            return held_out_metrics(scores, held_out)

        return EarlyStopping(section.eval_every or epoch, section.patience, measure)
