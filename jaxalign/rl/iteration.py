"""One iteration of RL: select prompts, sample responses, score them, compute experience, check it, and update the models.

This module uses neither a work directory nor a whole config: `Iteration` takes the setup, a sampler, a reward, prompts, the
reference and hooks, and is called as `iteration(state, step) -> (state, metrics)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.data.loader import EpochLoader
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models import flops
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Params
from jaxalign.parallel.rows import fetch, place_rows
from jaxalign.records import Experience, Prompt, Rollout
from jaxalign.rewards.base import Listener, Reward, RewardBatch, Scored
from jaxalign.rewards.scorer import LearntScore
from jaxalign.rl.estimators import check_estimates, estimator_of
from jaxalign.rl.experience import greedy_baseline, make_experience
from jaxalign.rl.metrics import ExperienceMetrics, IterationMetrics, UpdateMetrics, mean_of
from jaxalign.rl.monitor import Monitor, OnChecks
from jaxalign.rl.program_times import RunProgram, unrecorded
from jaxalign.rl.sampled_ahead import AheadRollouts
from jaxalign.rl.state import PPOSetup, PPOState
from jaxalign.rl.update import ppo_update
from jaxalign.rollout.responses import Padding
from jaxalign.rollout.sampler import TokenSampler, sample_rollout
from jaxalign.rollout.sampling import Sampling
from jaxalign.rollout.stops import StoppingSampler
from jaxalign.steps import work
from jaxalign.steps.offload import FrozenRole, move_optimizer_state, to_device, to_host
from jaxalign.steps.packed import part_rows, rows_split
from jaxalign.tracking.timing import Timeline

BUCKET = 8
"""Prompts are padded to a multiple of this many tokens."""


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """The rows of one iteration. Rows with the same prompt are neighbours.

    Attributes:
      prompts: the prompt of each row, for rewards.
      ids: the token ids of each row's prompt.
      rows: the global row numbers, which determine each row's random numbers.
    """

    prompts: list[Prompt]
    ids: list[Sequence[int]]
    rows: range


@dataclasses.dataclass(frozen=True)
class PromptStream:
    """All prompts of a run, in a new order each epoch. Iteration `step` is a pure function of (seed, step).

    If there are fewer prompts than an iteration needs, they repeat within it.

    Attributes:
      prompts: the distinct prompts.
      ids: their token ids.
      batch: the number of responses per iteration.
      group_size: the number of responses to each prompt.
      seed, stream: select the order.
    """

    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    batch: int
    group_size: int
    seed: int
    stream: int

    def at(self, step: int) -> PromptBatch:
        """The rows of iteration `step`."""
        loader = EpochLoader(len(self.ids), self.batch // self.group_size, self.seed, self.stream)
        index = [int(i) for i in loader.indices(step) for _ in range(self.group_size)]
        rows = range(step * self.batch, (step + 1) * self.batch)
        return PromptBatch([self.prompts[i] for i in index], [self.ids[i] for i in index], rows)

    @property
    def width(self) -> int:
        """The length to which prompts are padded. It is the same for all iterations, so that programs are compiled once."""
        return -(-max(map(len, self.ids)) // BUCKET) * BUCKET


class Scoring(NamedTuple):
    """What is known of a rollout before its experience is made.

    Attributes:
      sampled: the rollout, on the policy's mesh.
      recompute: whether the trainer's log-probabilities replace those of the sampler.
      outputs: the results of `Iteration.forward`.
      scored: the scores; None if the reward model is fused into the scoring program.
      kept: bool [B], False for rows whose score was dropped; None: all rows have a score.
      baseline: float32 [B], rewards of greedy responses, or None.
    """

    sampled: Rollout
    recompute: bool
    outputs: dict[str, jax.Array]
    scored: Scored | None
    kept: Any
    baseline: Any


def part_means(parts: Mapping[str, Any], counted) -> dict[str, jax.Array]:
    """The mean of each part of a reward, by metric name, over the counted responses with a score of this part; NaN
    if there are none.

    Args:
      parts: float32 [B] or [B, N] by name, not finite where a response has no score; a part of weight 0 may lack some.
      counted: bool [B].
    """
    totals = {name: x if jnp.ndim(x) == 1 else jnp.sum(jnp.asarray(x), axis=1) for name, x in parts.items()}
    return {f"score_{name}": mean_of(x, counted & jnp.isfinite(jnp.asarray(x))) for name, x in totals.items()}


class Iteration:
    """Runs one iteration per call: `iteration(state, step) -> (state, metrics)`. The state is donated.

    Args:
      setup: models, optimizers and options.
      stream: the prompts of each iteration.
      sampler: samples the responses; it receives the policy's weights before each iteration.
      padding: the shape of the rollout's arrays.
      sampling: temperature, top-k, top-p, the maximum number of new tokens and the ids that end a response.
      reward: scores the responses.
      tokenizer: decodes responses for rewards that read text.
      reference: the reference's parameters; with adapters, joined with the base.
      frozen: the base under the adapters, or None.
      offload_optimizer: keep optimizer states in host memory between updates.
      on_checks: receives the step-0 checks.
      stop: texts that end a response, besides the ids of `sampling`.
      ahead: keeps the next iteration's rollout if it is sampled with the weights before the update (`ppo.sample_ahead`); None:
        each rollout is sampled with the newest weights.
      title: the name of the stage in messages.

    Raises:
      UserError: `config.ppo.micro_batch_tokens` is too small for one row.
    """

    program: RunProgram = staticmethod(unrecorded)

    def __init__(
        self, setup: PPOSetup, stream: PromptStream, sampler: TokenSampler, padding: Padding, sampling: Sampling,
        reward: Reward, tokenizer: Tokenizer, reference: FrozenRole, frozen: Params | None = None,
        offload_optimizer: bool = False, on_checks: OnChecks | None = None, stop: tuple[str, ...] = (),
        ahead: AheadRollouts | None = None, title: str = "ppo",
    ):
        self.setup, self.stream, self.padding, self.sampling, self.stop = setup, stream, padding, sampling, stop
        self.sampler = StoppingSampler(sampler, stop, tokenizer.decode) if stop else sampler
        self.reward, self.tokenizer, self.reference, self.frozen = reward, tokenizer, reference, frozen
        self.offloads_optimizer, self.fused, self.ahead = offload_optimizer, reward.fused(), ahead
        self.monitor, self.timeline = Monitor(setup, on_checks, title), Timeline()
        section, width = setup.config, min(padding.bucket + setup.config.max_new_tokens, padding.max_length)
        part_rows(section.batch, width, section.micro_batch_tokens, *rows_split(setup.policy.sharding))

    def __call__(self, state: PPOState, step: int) -> tuple[PPOState, IterationMetrics]:
        batch, params = self.stream.at(step), join(self.frozen, state.policy.params)
        host = None if self.ahead is None else self.ahead.take(step)
        stale = host is not None
        if host is None:
            host = self.sample(params, batch, self._key(state, step), step)
        sampled = self._received(step, host)
        begun = self.begin_next(params, state, step, scored=False)
        with self.timeline.phase("score") as phase:
            experience, metrics = jax.block_until_ready(self.score(state, params, batch, step, sampled, stale))
            phase.tokens, phase.flops = self._scoring_work()
        begun = begun or self.begin_next(params, state, step, scored=True)
        self.monitor.settle()
        if not stale:
            self.monitor.scored(step, metrics)
        check_estimates(
            self.setup.config, experience.rewards, experience.values, experience.advantages, experience.returns
        )
        with self.timeline.phase("update") as phase:
            state, learnt = jax.block_until_ready(self.update(state, experience))
            epochs = float(learnt.epochs_run)
            work_of_epoch = flops.learning(self.setup.policy, self._lengths, self._new_tokens)
            if self.setup.owns_critic:
                work_of_epoch += flops.learning(self.setup.critic, self._lengths)
            phase.tokens, phase.flops = round(epochs * np.sum(self._lengths)), epochs * work_of_epoch
        if begun is not None:
            self.ahead.put(step + 1, begun())
        self.monitor.updated(step, learnt, stale)
        if self.setup.recomputes:  # Scoring then measures the sampler's gap; otherwise the update does.
            learnt = dataclasses.replace(learnt, sampler_gap=None)
        if stale:  # The difference includes what the policy has learnt since.
            metrics, learnt = (dataclasses.replace(x, sampler_gap=None) for x in (metrics, learnt))
        return state, IterationMetrics(experience=metrics, update=learnt)

    def _key(self, state: PPOState, step: int) -> jax.Array:
        """The PRNG key of the responses of an iteration."""
        return jax.random.fold_in(jax.random.wrap_key_data(state.policy.key), step)

    def sample(self, params: Params, batch: PromptBatch, key: jax.Array, version: int) -> Rollout:
        """Samples responses to the batch: a rollout of numpy arrays. params: the policy's, joined; version: their updates."""
        with self.timeline.phase("generate") as phase:
            self.update_sampler(params, version)
            listener = None if self.ahead is not None else self.reward.listen(batch.prompts)
            rollout = self.respond(batch, key, self.sampling, listener)
            phase.tokens, phase.flops = work.sampled(self.setup.reference, rollout)
            return rollout

    def respond(self, batch: PromptBatch, key: jax.Array, sampling: Sampling, listener: Listener | None = None) -> Rollout:
        """Samples a response to each prompt of a batch with the sampler's weights."""
        return self.program("generate", "generator", lambda: sample_rollout(
            self.sampler, self.padding, batch.ids, key, batch.rows, sampling, listener
        ))

    def _received(self, step: int, rollout: Rollout) -> Rollout:
        """A rollout on the devices, split over the batch axes."""
        self.monitor.sampled(step, rollout)
        self._lengths = rollout.prompt_length + rollout.response_length
        self._new_tokens = int(rollout.response_length.sum())
        return place_rows(self.setup.policy.sharding, rollout)

    def begin_next(self, params: Params, state: PPOState, step: int, scored: bool) -> Callable[[], Rollout] | None:
        """Begins to sample the next iteration's responses, if they are sampled ahead: called before scoring and after it, until
        it returns a function that waits for them, in the phase "generate". On a common mesh they are sampled before it returns.

        Args:
          params: the policy's, joined.
          scored: whether the rollout of iteration `step` has been scored.
        """
        if self.ahead is None or step + 1 >= self.setup.config.iterations:
            return None
        rollout = self.sample(params, self.stream.at(step + 1), self._key(state, step + 1), step)
        return lambda: rollout

    def update_sampler(self, params: Params, version: int) -> None:
        """Gives the sampler the policy's weights. params: joined; version: the number of updates they have had."""
        self.sampler.update(params, version)

    def score(
        self, state: PPOState, params: Params, batch: PromptBatch, step: int, sampled: Rollout, stale: bool = False
    ) -> tuple[Experience, ExperienceMetrics]:
        """(experience, metrics) for a rollout. At step 0 this also runs the step-0 checks.

        stale: whether the weights that sampled the rollout have been updated since.
        """
        setup = self.setup
        recompute = setup.recomputes or (not stale and self.monitor.must_recompute(params, step, sampled))
        outputs, scored, kept, baseline = self.forward(state, params, recompute, sampled), None, None, None
        if not self.fused:
            scored = self.scored(sampled, batch)
            kept = scored.kept
        if estimator_of(setup.config).needs_greedy:
            baseline, greedy_kept = self._baseline(batch, self._key(state, step))
            kept = greedy_kept if kept is None else kept if greedy_kept is None else kept & greedy_kept
        given = Scoring(sampled, recompute, outputs, scored, kept, baseline)
        experience, metrics = self.experience(state, params, given)
        if step == 0 and setup.config.checks.step_zero:
            self.check_start(state, sampled, experience)
        counted = sampled.prompt_length > 0 if kept is None else (sampled.prompt_length > 0) & jnp.asarray(kept)
        return experience, dataclasses.replace(metrics, parts={} if scored is None else part_means(scored.parts, counted))

    def scored(self, sampled: Rollout, batch: PromptBatch) -> Scored:
        """The scores of a rollout from a reward that is not fused."""
        given = self.reward_batch(sampled, batch.prompts, batch.rows.start)
        return self.program("reward", "reward", lambda: self.reward.score(given))

    def forward(self, state: PPOState, params: Params, recompute: bool, sampled: Rollout) -> dict[str, jax.Array]:
        """Starts what can run while the reward scores; nothing if one program runs all roles. params: the policy's, joined."""
        return {}

    def experience(self, state: PPOState, params: Params, given: Scoring) -> tuple[Experience, ExperienceMetrics]:
        """(experience, metrics) of a scored rollout. params: the policy's, joined."""
        setup, scored = self.setup, given.scored
        critic = params if setup.shares_trunk else join(self.frozen, state.critic.params) if setup.has_critic else None
        read_scorer = self.fused.role.on_device() if scored is None else contextlib.nullcontext()
        with self.reference.on_device() as reference, read_scorer as scorer_params:
            scores = LearntScore(self.fused.scorer, scorer_params) if scored is None else scored.scores
            return make_experience(
                setup, given.recompute, reference, params, critic, state.kl_coef, given.sampled, scores, given.kept,
                given.baseline, self.frozen,
            )

    def check_start(self, state: PPOState, sampled: Rollout, experience: Experience) -> None:
        """Runs the step-0 checks."""
        with self.reference.on_device() as reference:
            self.monitor.step_zero(state, sampled, experience, reference, self.frozen)

    def update(self, state: PPOState, experience: Experience) -> tuple[PPOState, UpdateMetrics]:
        """Runs all epochs over the experience: (state, metrics). The state is donated."""
        if self.offloads_optimizer:
            state = move_optimizer_state(state, to_device)
        state, metrics = self.run_update(state, experience)
        return self.offload_optimizer_state(state), metrics

    def read_in_update(self) -> contextlib.AbstractContextManager[Params | None]:
        """A context with the reference's parameters on the devices if the loss reads them, else with None."""
        return self.reference.on_device() if self.setup.loss_reads_reference else contextlib.nullcontext()

    def run_update(self, state: PPOState, experience: Experience) -> tuple[PPOState, UpdateMetrics]:
        """`update` of a state on the devices."""
        with self.read_in_update() as reference:
            return ppo_update(self.setup, state, experience, self.frozen, reference, self.program)

    def offload_optimizer_state(self, state: PPOState) -> PPOState:
        """Moves the optimizer states of a state, concrete or abstract, to host memory, if configured (`offload_optimizer`)."""
        return move_optimizer_state(state, to_host) if self.offloads_optimizer else state

    def mean_score(
        self, params: Params, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], key: jax.Array, version: int
    ) -> float:
        """The mean reward of one sampled response to each prompt, over the responses that have a score; NaN if none has.

        Args:
          params: the policy's trained parameters; version: their version.
          prompts: the prompts; ids: their token ids.
          key: the PRNG key of the samples.
        """
        sharding = self.setup.policy.sharding
        parts = math.lcm(sharding.batch_size, sharding.generation.batch_size)
        index = [i % len(ids) for i in range(-(-len(ids) // parts) * parts)]  # Repeat prompts until the mesh divides the rows.
        padding = dataclasses.replace(self.padding, batch=parts)
        self.update_sampler(join(self.frozen, params), version)
        rollout = sample_rollout(self.sampler, padding, [ids[i] for i in index], key, range(len(index)), self.sampling)
        batch = self.reward_batch(place_rows(sharding, rollout), [prompts[i] for i in index], 0)
        scored = self.reward.score(batch)
        scores, kept = fetch((scored.scores, np.ones(len(index), bool) if scored.kept is None else scored.kept))
        totals = np.asarray(scores, np.float64).reshape(len(index), -1).sum(axis=1)[: len(ids)]
        kept = np.asarray(kept, bool)[: len(ids)]
        return float(totals[kept].mean()) if kept.any() else float("nan")

    def reward_batch(self, rollout: Rollout, prompts: Sequence[Prompt], first_row: int) -> RewardBatch:
        """The responses of a rollout on the devices, as the reward receives them. prompts, first_row: see `RewardBatch`."""
        return RewardBatch(rollout, prompts, first_row, self.tokenizer, self.stop)

    def _baseline(self, batch: PromptBatch, key: jax.Array):
        """(float32 [B]: rewards of greedy responses to the same prompts; bool [B]: which rows have one, or None if all do)."""
        greedy = dataclasses.replace(self.sampling, temperature=0.0)
        best = place_rows(self.setup.policy.sharding, self.respond(batch, key, greedy))
        scored = self.scored(best, batch)
        scores = jnp.asarray(scored.scores)
        if scored.kept is not None:
            kept = jnp.asarray(scored.kept)
            scores = jnp.where(kept if scores.ndim == 1 else kept[:, None], scores, 0)
        return greedy_baseline(self.setup.config, best, scores), scored.kept

    def _scoring_work(self) -> tuple[int, float]:
        """(tokens, FLOPs) for scoring the last rollout with reference, critic and a fused reward model."""
        setup = self.setup
        own, fused = flops.forward(setup.critic, self._lengths) if setup.runs_critic else 0.0, self.reward.fused()
        if fused:
            scorer = fused.scorer
            own += scorer.members * flops.forward(scorer.model, self._lengths)
        return int(np.sum(self._lengths)), own + flops.forward(setup.reference, self._lengths, self._new_tokens)
