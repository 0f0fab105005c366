"""The updates of online direct preference optimisation: epochs of minibatches over an iteration's fresh pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import optax

from jaxalign import streams
from jaxalign.config import Dpo, OnlineDpo
from jaxalign.models.model import Model, Params
from jaxalign.parallel.rows import fetch
from jaxalign.records import AnswerPairs
from jaxalign.trainers.answers import packed
from jaxalign.training.arguments import DirectArguments, LogprobArguments
from jaxalign.training.direct_step import answer_logprobs, direct_step
from jaxalign.training.metrics import DirectMetrics
from jaxalign.training.offload import optimizer_to_device, optimizer_to_host
from jaxalign.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class OnlineUpdates:
    """Updates a policy on the pairs of one iteration.

    Attributes:
      model: the policy.
      optimizer: the optimizer of the trained parameters.
      section: the numbers of iterations, epochs and minibatches.
      objective: the config section `dpo`, which defines the loss.
      frozen: the base under the adapters, or None.
      seed: seeds the order of the pairs.
      offloads_optimizer: keep the optimizer state in host memory between updates.
    """

    model: Model
    optimizer: optax.GradientTransformation
    section: OnlineDpo
    objective: Dpo
    frozen: Params | None
    seed: int
    offloads_optimizer: bool = False

    def run(self, state: TrainState, pairs: AnswerPairs, iteration: int) -> tuple[TrainState, DirectMetrics]:
        """(state, metrics) after all minibatches of an iteration; the metrics are means over the updates."""
        found = []
        state = optimizer_to_device(state) if self.offloads_optimizer else state
        for rows in self.minibatches(iteration):
            batch, parts = packed(self.objective, self.model, pairs, rows)
            arguments = DirectArguments(
                model=self.model,
                optimizer=self.optimizer,
                section=self.objective,
                batch=batch,
                frozen=self.frozen,
                packed=parts,
            )
            state, metrics = direct_step(state, arguments)
            found.append(metrics)
        return self.rest(state), jax.tree.map(lambda *values: sum(values) / len(values), *found)

    def rest(self, state: TrainState) -> TrainState:
        """A state, concrete or abstract, as it is stored between updates."""
        return optimizer_to_host(state) if self.offloads_optimizer else state

    def minibatches(self, iteration: int) -> Iterator[np.ndarray]:
        """The pairs of each update. Every epoch visits each pair once, in a new order if there are several minibatches."""
        section = self.section
        for epoch in range(section.epochs):
            order = np.arange(section.batch)
            if section.minibatches > 1:
                stream = streams.LOADERS["online_dpo minibatches"]
                order = np.random.default_rng([self.seed, stream, iteration, epoch]).permutation(section.batch)
            yield from order.reshape(section.minibatches, section.batch // section.minibatches)

    def logprobs(self, params: Params, pairs: AnswerPairs) -> np.ndarray:
        """float32 [B, 2]: the log-probability of every answer under `params` (adapters joined with their base)."""
        own, parts = packed(self.objective, self.model, pairs, np.arange(len(pairs.label)))
        return fetch(answer_logprobs(LogprobArguments(model=self.model, params=params, pairs=own, packed=parts)).logprobs)
