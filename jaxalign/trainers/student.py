"""Trains a smaller reward model, the student, to predict the scores of a larger one, the teacher."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxalign.data.loader import EpochLoader
from jaxalign.errors import UserError
from jaxalign.models.adapters.lora import merge, trained
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import place_rows
from jaxalign.records import ScoredPairs
from jaxalign.rewards.scorer import Scorer
from jaxalign.steps.arguments import DistillArguments
from jaxalign.steps.checkpoint import copy_params
from jaxalign.steps.loop import Step
from jaxalign.steps.preference_step import distill_step
from jaxalign.trainers.base import Trainer


class Student(Trainer):
    """Distils a reward model on pairs that the teacher has scored."""

    name = "Student"

    def fit(self, train: ScoredPairs, scale: float, loader: EpochLoader) -> Iterator[Step]:
        """Trains and yields each step.

        Args:
          train: pairs with the teacher's normalised scores, numpy arrays.
          scale: the teacher's scale, in nats per unit of the normalised score.
          loader: selects the pairs of each batch.
        """
        model, section = self.inputs.model, self.section

        def arguments(frozen: Params | None, index: np.ndarray) -> DistillArguments:
            del frozen  # A student has no adapters.
            return DistillArguments(
                model=model,
                optimizer=self.optimizer,
                objective=section.objective,
                scale=scale,
                micro_batches=section.micro_batches,
                batch=place_rows(model.sharding, train, index),
            )

        return self._train(distill_step, arguments, train, loader, shown=("loss", "agreement"))


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
