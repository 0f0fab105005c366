"""Trains one preference model on arrays of pairs, with optional early stopping on held-out pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxalign.config import Preference
from jaxalign.data.loader import EpochLoader, take
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import fetch
from jaxalign.records import PairBatch
from jaxalign.rewards.scorer import Scorer
from jaxalign.trainers.fitting import Fit, Program, RunSettings, Start
from jaxalign.trainers.preference_quality import held_out_metrics, measurable
from jaxalign.trainers.scoring import all_scores, packed
from jaxalign.training.arguments import PreferenceArguments
from jaxalign.training.early_stopping import EarlyStopping
from jaxalign.training.loop import Step
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.preference_step import preference_step
from jaxalign.training.work import learning_pairs


class Member:
    """Trains one preference model on arrays of pairs, for the stage preference and for `RewardModel`.

    Args:
      start: the model with its scalar head and the functions that read its weights.
      section: the optimizer and the batch.
      run: seed, key and loop.
      train: the pairs, numpy arrays.
      loader: selects the pairs of each batch.
      held_out: the pairs on which early stopping measures the loss; not read without early stopping.

    Raises:
      UserError: early stopping has no pair to measure the loss on.
    """

    def __init__(
        self, start: Start, section: Preference, run: RunSettings, train: PairBatch, loader: EpochLoader,
        held_out: PairBatch | None = None,
    ):
        self._start, self._section, self._train, self._loader = start, section, train, loader
        self._held_out = held_out if section.early_stopping else None
        if section.early_stopping and not measurable(held_out):
            raise UserError("early_stopping is True, but none of the held-out pairs that would measure the loss has a label "
                            "that prefers an answer; give more pairs, raise held_out_share, or set early_stopping to False")
        self.total_steps = loader.steps(section.epochs)
        self.fit = Fit(start, make_optimizer(section.optimizer, self.total_steps), run)

    def steps(self) -> Iterator[Step]:
        """Trains and yields each step."""
        program = Program(preference_step, self._arguments, self._flops, self._tokens, shown=("loss", "accuracy"))
        return self.fit.steps(program, self.total_steps, self._section.checkpoint_every, stopping=self._stopping())

    def stopped(self) -> dict[str, Any]:
        """The result of early stopping, after training: the number of steps trained, and the best step with its loss."""
        state = self.fit.training.state
        step, loss = fetch((state.best_step, state.best_loss))
        return {"steps": self.fit.training.completed, "best_step": int(step), "held_out_loss": float(loss)}

    def _stopping(self) -> EarlyStopping | None:
        if self._held_out is None:
            return None
        section, scorer = self._section, Scorer(self._start.model)

        def held_out(params: Params) -> dict[str, float]:
            scores = all_scores(scorer, join(self.fit.frozen, params), self._held_out, section.batch)
            return held_out_metrics(scores, self._held_out)

        return EarlyStopping(section.eval_every or self._loader.steps(1), section.patience, held_out)

    def _arguments(self, frozen: Params | None, number: int) -> PreferenceArguments:
        model, section = self._start.model, self._section
        batch, parts = packed(model, self._train, self._loader.indices(number), section.micro_batch_tokens)
        return PreferenceArguments(
            model=model,
            optimizer=self.fit.optimizer,
            centering_coef=section.centering_coef,
            batch=batch,
            frozen=frozen,
            packed=parts,
        )

    def _tokens(self, number: int) -> int:
        return int(self._train.length[self._loader.indices(number)].sum())

    def _flops(self, number: int) -> float:
        return learning_pairs(self._start.model, take(self._train, self._loader.indices(number)))
