"""Trains a smaller reward model, the student, to predict the scores of a larger one, the teacher."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxalign.config import RewardDistill
from jaxalign.data.loader import EpochLoader, take
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import merge, trained
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import place_rows
from jaxalign.records import ScoredPairs
from jaxalign.rewards.scorer import Scorer
from jaxalign.trainers.fitting import Fit, Program, RunSettings, Start
from jaxalign.training import work
from jaxalign.training.arguments import DistillArguments
from jaxalign.training.checkpoint import copy_params
from jaxalign.training.distill_step import distill_step
from jaxalign.training.loop import Step
from jaxalign.training.optimizer import make_optimizer


class Student:
    """Distils a reward model on pairs that the teacher has scored.

    Args:
      start: the student's model and its initial weights.
      section: the objective, the optimizer and the batch.
      run: seed, key and loop.
      train: pairs with the teacher's normalised scores, numpy arrays.
      scale: the teacher's scale, in nats per unit of the normalised score.
      loader: selects the pairs of each batch.
    """

    def __init__(
        self, start: Start, section: RewardDistill, run: RunSettings, train: ScoredPairs, scale: float, loader: EpochLoader
    ):
        self._start, self._section, self._train, self._scale, self._loader = start, section, train, scale, loader
        self.total_steps = loader.steps(section.epochs)
        self.fit = Fit(start, make_optimizer(section.optimizer, self.total_steps), run)

    def steps(self) -> Iterator[Step]:
        """Trains and yields each step."""
        program = Program(distill_step, self._arguments, self._flops, self._tokens, shown=("loss", "agreement"))
        return self.fit.steps(program, self.total_steps, self._section.checkpoint_every)

    def _arguments(self, frozen: Params | None, number: int) -> DistillArguments:
        del frozen  # A student has no adapters.
        model, section = self._start.model, self._section
        return DistillArguments(
            model=model,
            optimizer=self.fit.optimizer,
            objective=section.objective,
            scale=self._scale,
            micro_batches=section.micro_batches,
            batch=place_rows(model.sharding, self._train, self._loader.indices(number)),
        )

    def _tokens(self, number: int) -> int:
        return int(self._train.length[self._loader.indices(number)].sum())

    def _flops(self, number: int) -> float:
        return work.learning_pairs(self._start.model, take(self._train, self._loader.indices(number)))


def first_layers(teacher: tuple[Scorer, Params], model: Model) -> Params:
    """The teacher's embedding, first layers, final norm and head, for a student of the same widths. An ensemble's first member
    is the teacher.

    Raises:
      UserError: a size other than the number of layers differs, or the student has more layers than the teacher.
    """
    sizes, own = teacher[0].model.config, model.config
    for name in ("embed", "heads", "kv_heads", "head_dim", "mlp"):
        if getattr(sizes, name) != getattr(own, name):
            raise UserError(f"config.reward_distill.{name} is {getattr(own, name)} and the teacher's is {getattr(sizes, name)};"
                            " with start 'teacher' they must be equal: set the teacher's value, or start from 'random'")
    if own.layers > sizes.layers:
        raise UserError(f"config.reward_distill.layers is {own.layers}; with start 'teacher' it must be at most the "
                        f"teacher's ({sizes.layers})")
    params, lora = teacher[1], teacher[0].model.lora
    if teacher[0].ensemble is not None:  # With adapters, only the members' adapters are stacked.
        params = params | jax.tree.map(lambda x: x[0], params if lora is None else trained(params))
    params = params if lora is None else merge(lora, params)
    params = copy_params({name: params[name] for name in model.abstract()})
    params = params | {"blocks": jax.tree.map(lambda x: x[: own.layers], params["blocks"])}
    return jax.device_put(params, model.shardings())
