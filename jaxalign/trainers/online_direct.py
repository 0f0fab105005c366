"""Direct preference optimisation on pairs of the policy's own answers, which are sampled and labelled in each iteration."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import jax
import numpy as np

from jaxalign import streams
from jaxalign.config import DPOConfig, OnlineDPOConfig
from jaxalign.data.chat import styles
from jaxalign.data.loader import EpochLoader
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.critique import count_outcomes
from jaxalign.feedback.labeller import Pair, incomplete_sides
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.parallel.sharding import Sharding
from jaxalign.reasons import COMPARISON, LEAST_ONLINE, advice, too_few, usable_sentence
from jaxalign.records import AnswerPairs, Comparison, Prompt, Rollout
from jaxalign.registry.objectives import is_custom
from jaxalign.rl.arguments import RoleArguments
from jaxalign.rl.checks import act_on, gap_check, gradients_check, sampler_difference, sampler_tolerance, unexplained
from jaxalign.rl.placed import RoleWeights
from jaxalign.rl.program_times import recorded_in
from jaxalign.rollout.sampler import Engine, make_sampler, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps import work
from jaxalign.steps.arguments import DirectArguments, LogprobArguments
from jaxalign.steps.direct_step import answer_logprobs, direct_step
from jaxalign.steps.metrics import DirectMetrics, OnlineDirectMetrics
from jaxalign.steps.offload import FrozenRole, move_optimizer_state, to_device, to_host
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.packed import pack_rollout
from jaxalign.steps.state import TrainState, abstract_state, init_state
from jaxalign.tracking.timing import Timeline
from jaxalign.trainers.answers import answer_pairs, packed
from jaxalign.trainers.base import Step, Trainer
from jaxalign.trainers.extent import rate_warning, schedule_warning, warn_of_extent
from jaxalign.trainers.inputs import TrainerInputs, peak_flops

_OF_PAIRS = ("loss", "chosen_reward", "rejected_reward", "margin", "accuracy", "nll")
"""The metrics that are means over the pairs of a minibatch."""


@dataclasses.dataclass(frozen=True)
class OnlineDPOParts:
    """The parts of a run of online DPO other than the policy and the prompts.

    Attributes:
      tokenizer: decodes answers for the labeller.
      style: the format of dialogues.
      sampling: temperature, top-k, top-p, the maximum number of new tokens and the ids that end an answer.
      max_length: the maximum length of prompt plus answer, in tokens.
      objective: the config section `dpo`, which defines the loss.
      label: `label(pairs, key, number of the first pair) -> the labelled pairs`.
      undecided: what to do with pairs without a clear label, as in `config.feedback.undecided`.
      write: `write(iteration, labelled pairs)`: saves the pairs of an iteration.
      timeline: times the phases of an iteration.
      sampler: samples the answers: the value of `config.sampler`.
      offload: the arrays kept in host memory while no program reads them, as in `config.mesh.offload`.
      shardings: the mesh of each role that `placement.resolve` places; None: all roles share the policy's mesh.
    """

    tokenizer: Tokenizer
    style: str
    sampling: Sampling
    max_length: int
    objective: DPOConfig
    label: Callable[[Sequence[Pair], jax.Array, int], list[Comparison]]
    undecided: str
    write: Callable[[int, Sequence[Comparison]], None]
    timeline: Timeline
    sampler: str = "local"
    offload: tuple[str, ...] = ()
    shardings: Mapping[str, Sharding] | None = None


class OnlineDPO(Trainer):
    """Samples two answers to each prompt, labels them, and updates the policy on the pairs, in each iteration."""

    name = "online_dpo"
    _warned = False

    @classmethod
    def from_parts(cls, inputs: TrainerInputs, section: OnlineDPOConfig, parts: OnlineDPOParts) -> Self:
        """A trainer with its optimizer. section: a valid config section."""
        trainer = cls.from_inputs(inputs, section)
        trainer._parts = parts
        updates = section.iterations * section.epochs * section.minibatches
        trainer.optimizer = make_optimizer(section.optimizer, updates, is_custom(parts.objective.objective))
        return trainer

    def fit_encoded(self, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]]) -> Iterator[Step]:
        """Trains on prompts and yields each iteration.

        Args:
          prompts: the prompts.
          ids: their token ids.

        Raises:
          UserError: a check that is configured to stop the run does so, or too few pairs of an iteration can be trained on.
        """
        inputs, parts, section, model = self.inputs, self._parts, self.section, self.inputs.model
        self._prompts, self._ids = prompts, ids
        self._loader = EpochLoader(len(prompts), section.batch, inputs.seed, streams.LOADERS["online_dpo"])
        self._size = section.batch // section.minibatches
        # All iterations pad prompts to the same length, so that sampling compiles once.
        bucket = -(-max(len(prompt) for prompt in ids) // 8) * 8
        self.frozen = inputs.frozen()
        self._weights = RoleWeights(parts.shardings or {"policy": model.sharding, "reference": model.sharding}, self.frozen)
        sampled = model.on(self._weights.sharding("generator"))
        self._engine = Engine(sampled, 2 * self._size, parts.max_length, bucket)
        self._sampler = make_sampler(parts.sampler, self._engine, "config.sampler")
        self._times = recorded_in(inputs.loop.directory, parts.shardings)
        start = self._weights.on("reference", inputs.weights())
        self._reference = FrozenRole(start, "frozen" in parts.offload, self.frozen)
        del start  # The role holds the weights, possibly in host memory.

        def init() -> TrainState:
            with self._reference.on_device() as start:
                params = inputs.trained(start if parts.shardings is None else inputs.weights())
            return self._offload_optimizer(init_state(model, self.optimizer, params, inputs.key))

        loop = dataclasses.replace(
            inputs.loop, total_steps=section.iterations, checkpoint_every=section.checkpoint_every,
            shown=("loss", "decided", "kl"), timeline=parts.timeline, peak=peak_flops(model, parts.shardings),
        )
        updates = section.iterations * section.epochs * section.minibatches
        warn_of_extent(inputs.loop.stage, schedule_warning(section.optimizer, updates), rate_warning(section.optimizer, model))
        self.training = loop.begin(init, self._offload_optimizer(abstract_state(model, self.optimizer)), self._iterate)
        yield from self.training

    def _offload_optimizer(self, state: TrainState) -> TrainState:
        """Moves the optimizer state to host memory, if configured."""
        return move_optimizer_state(state, to_host) if "optimizer" in self._parts.offload else state

    def _iterate(self, state: TrainState, step: int) -> tuple[TrainState, OnlineDirectMetrics]:
        with self._times.iteration(step):
            return self._run_iteration(state, step)

    def _run_iteration(self, state: TrainState, step: int) -> tuple[TrainState, OnlineDirectMetrics]:
        parts, section = self._parts, self.section
        index = self._loader.indices(step)
        params = join(self.frozen, state.params)
        self._sampler.update(self._weights.on_recorded("generator", params, self._times.run), step)
        collected = [
            self._collect(params, index[first : first + self._size], step * section.batch + first)
            for first in range(0, section.batch, self._size)
        ]
        parts.write(step, [comparison for _, labelled, _ in collected for comparison in labelled])
        pairs = jax.tree.map(lambda *x: np.concatenate(x), *(batch for batch, _, _ in collected))
        self._require_usable(step, [comparison for _, labelled, _ in collected for comparison in labelled], pairs.weight > 0)
        measured = [metrics for _, _, metrics in collected]
        means = {name: float(np.mean([row[name] for row in measured])) for name in ("kl", "length", "eos_rate")}
        totals = {name: sum(row[name] for row in measured) for name in ("decided", "tokens")}
        with parts.timeline.phase("update") as phase:  # Blocking is free here: sampling needs the result.
            state, update = jax.block_until_ready(self._update(state, pairs, step))
            phase.tokens = section.epochs * int(pairs.length.sum())
            phase.flops = section.epochs * work.learning_pairs(self.inputs.model, pairs)
        share = f"share of the updates of iteration {step} whose gradient is not finite"
        act_on((gradients_check(float(unexplained(update)), share),), section.checks, self.name, self.inputs.loop.stage)
        return state, OnlineDirectMetrics(**means, **totals, update=update)

    def _collect(
        self, params: Params, index: np.ndarray, first_row: int
    ) -> tuple[AnswerPairs, list[Comparison], dict[str, float]]:
        """(pairs with their reference log-probs as numpy, comparisons, metrics by name) for the prompts `index`.

        Args:
          first_row: the global number of the first prompt.
        """
        parts, model, keys = self._parts, self.inputs.model, streams.KEYS["online_dpo"]
        # One call samples both answers to a prompt, at neighbouring global rows.
        rows = range(2 * first_row, 2 * (first_row + len(index)))
        twice = [self._ids[i] for i in index for _ in range(2)]
        with parts.timeline.phase("generate") as phase:
            key = jax.random.fold_in(self.inputs.root_key, keys["samples"])
            rollout = self._times.run("generate", "generator", lambda: sample_rollout(
                self._sampler, self._engine.padding, twice, key, rows, parts.sampling, versions=False
            ))
            phase.tokens, phase.flops = work.sampled(model, rollout)
        if first_row == 0:
            self._check(params, place_rows(model.sharding, rollout))
        answers = styles.answers_of(parts.tokenizer, rollout, parts.style)
        asked = [_pair(self._prompts[i], *answers[2 * n : 2 * n + 2]) for n, i in enumerate(index)]
        labels_key = jax.random.fold_in(self.inputs.root_key, keys["labels"])
        labelled = self._times.run("labels", "judge", lambda: parts.label(asked, labels_key, first_row))
        answered = answer_pairs(rollout, labelled, parts.undecided)
        every = dataclasses.replace(answered, weight=np.ones_like(answered.weight))
        with parts.timeline.phase("score") as phase:
            with self._reference.on_device() as reference:
                start = self._logprobs("reference", reference, every)
            start, now = fetch((start, self._logprobs("policy", params, every)))
            phase.tokens, phase.flops = 2 * int(every.length.sum()), 2 * work.reading_pairs(model, every)
        metrics = {
            "decided": float(sum(c.decided for c in labelled)),
            "kl": float(np.mean(now - start)),
            "length": float(np.mean(rollout.response_length)),
            "eos_rate": float(np.mean(rollout.ended)),
            "tokens": int(rollout.response_length.sum()),
        }
        chosen = "none" if parts.objective.reference == "none" else self.section.reference
        reference = {"start": start, "iteration": now, "none": 0 * start}[chosen]
        return dataclasses.replace(answered, reference=reference), labelled, metrics

    def _require_usable(self, step: int, labelled: Sequence[Comparison], usable: np.ndarray) -> None:
        """Warns once if few pairs of an iteration can be trained on, and raises UserError below `online_dpo.required_share`."""
        total, count = len(labelled), int(usable.sum())
        few = too_few(total, count, "online_dpo.required_share", self.section.required_share)
        if not few and (count >= LEAST_ONLINE * total or self._warned):
            return
        reasons = count_outcomes(pair.outcome for pair, trained in zip(labelled, usable, strict=True) if not trained)
        sentence = usable_sentence(f"pairs of iteration {step}", total, count, reasons, known=COMPARISON)
        sentence = f"{sentence}; {advice(reasons, COMPARISON, online=True)}"
        if few:
            raise UserError(f"{few}: {sentence}")
        self._warned = True
        logging.getLogger("jaxalign").warning("%s: only %s", self.inputs.loop.stage, sentence)

    def _check(self, params: Params, sampled: Rollout) -> None:
        """Compares the sampler's and the trainer's log-probabilities on the first rollout of the run."""
        section = self.section
        sampled, parts = pack_rollout(sampled, 0, self.inputs.model.sharding)
        difference = sampler_difference(RoleArguments(
            model=self.inputs.model, temperature=section.temperature, params=params, rollout=sampled, parts=parts
        ))
        tolerance = sampler_tolerance(section.sampler_tolerance, self.inputs.model)
        checks = (gap_check(float(difference.gap), tolerance),)
        self._write_checks(checks)
        act_on(checks, section.checks, self.name, self.inputs.loop.stage)

    def _logprobs(self, role: str, params: Params, pairs: AnswerPairs) -> jax.Array:
        """float32 [B, 2]: the log-probability of every answer under `params` (adapters joined with their base), on the mesh of
        a role."""
        model = self.inputs.model.on(self._weights.sharding(role))
        batch, parts = packed(self._parts.objective, model, pairs, np.arange(len(pairs.label)))
        given = LogprobArguments(model=model, params=params, pairs=batch, packed=parts)
        name = "reference" if role == "reference" else "log-probabilities"
        return self._times.run(name, role, lambda: answer_logprobs(given).logprobs)

    def _update(self, state: TrainState, pairs: AnswerPairs, iteration: int) -> tuple[TrainState, DirectMetrics]:
        """(state, metrics) after all minibatches of an iteration; the metrics are those of `mean_metrics`."""
        model, objective, measured, counted = self.inputs.model, self._parts.objective, [], []
        state = move_optimizer_state(state, to_device) if "optimizer" in self._parts.offload else state
        for rows in minibatches(self.section, self.inputs.seed, iteration):
            batch, parts = packed(objective, model, pairs, rows)
            arguments = DirectArguments(
                model=model, optimizer=self.optimizer, section=objective, batch=batch, frozen=self.frozen, packed=parts
            )
            state, metrics = self._times.run(
                "policy update", "policy", functools.partial(direct_step, state, arguments), watched=lambda result: result[1]
            )
            measured.append(metrics)
            counted.append(bool(pairs.weight[rows].any()))
        return self._offload_optimizer(state), mean_metrics(measured, counted)


def mean_metrics(measured: Sequence[DirectMetrics], counted: Sequence[bool]) -> DirectMetrics:
    """Means over the updates; those of the loss and of the other values of pairs only over the updates that have pairs.

    Args:
      measured: the metrics of each update.
      counted: whether a pair of its minibatch has a weight above 0. Otherwise its values of pairs are 0.
    """

    def mean(*values: jax.Array) -> jax.Array:
        return sum(values) / len(values)

    own = [metrics for metrics, has_pairs in zip(measured, counted, strict=True) if has_pairs] or measured
    of_pairs = {name: mean(*(getattr(metrics, name) for metrics in own)) for name in _OF_PAIRS}
    return dataclasses.replace(jax.tree.map(mean, *measured), **of_pairs)


def _pair(prompt: Prompt, first: tuple[str, bool], second: tuple[str, bool]) -> Pair:
    """A pair of answers, each with whether it ended."""
    return Pair(prompt, first[0], second[0], incomplete=incomplete_sides(first[1], second[1]))


def minibatches(section: OnlineDPOConfig, seed: int, iteration: int) -> Iterator[np.ndarray]:
    """The pairs of each update. Every epoch visits each pair once, in a new order if there are several minibatches."""
    for epoch in range(section.epochs):
        order = np.arange(section.batch)
        if section.minibatches > 1:
            stream = streams.LOADERS["online_dpo minibatches"]
            order = np.random.default_rng([seed, stream, iteration, epoch]).permutation(section.batch)
        yield from order.reshape(section.minibatches, section.batch // section.minibatches)
