"""Compiles an iteration's jitted steps before any weights are read, from ShapeDtypeStructs of their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxalign.models.adapters.lora import join, strip_frozen
from jaxalign.models.model import Model, Params
from jaxalign.parallel.ahead import Ahead, log_errors
from jaxalign.parallel.shapes import Shapes
from jaxalign.records import Experience
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl.arguments import ExperienceArguments, StepZeroArguments, UpdateArguments
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import packed_experience
from jaxalign.rl.state import PPOSetup, PPOState, abstract_ppo_state
from jaxalign.rl.step_zero import checked_rows, step_zero_values
from jaxalign.rl.update import packed_update
from jaxalign.rollout.forecast import forecast, know
from jaxalign.rollout.ring import DECODING
from jaxalign.rollout.sampler import Engine
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.packed import part_rows, rows_split

Scores = Scorer | Literal["host", "unknown"]
"""How a reward computes its scores: a model that is fused into the scoring program; "host", a function on the host that returns
float32 [B] and a mask of kept rows; or "unknown" before the reward is constructed."""
NUM_DECODE_PROGRAMS_COMPILED_FIRST = 2
"""The number of decoding programs that are compiled before the programs that follow sampling."""


@dataclasses.dataclass(frozen=True)
class IterationShapes:
    """The abstract arguments of an iteration's steps after sampling.

    Attributes:
      scoring: the arguments of `packed_experience`.
      checks: the arguments of `step_zero_values`.
      state: the first argument of `packed_update`.
      update: the second argument of `packed_update`.
      turns: the maximum number of iterations of the loop over micro-batches in each of these three steps.
    """

    scoring: ExperienceArguments
    checks: StepZeroArguments
    state: PPOState
    update: UpdateArguments
    turns: tuple[int, int, int]


def iteration_shapes(
    setup: PPOSetup, state: PPOState, prompt: int, frozen: Params | None, reference: Params, scorer: Scorer | None,
    weights: Params | None, scored: bool, kept: bool,
) -> IterationShapes:
    """The arguments of an iteration's steps for one configuration.

    Args:
      setup: models, optimizers and options.
      state: `abstract_ppo_state(setup)`.
      prompt: the length to which prompts are padded.
      frozen: the base under the adapters, or None.
      reference: the reference's parameters; with adapters, joined with the base.
      scorer, weights: the reward model that is fused into scoring and its joined parameters, or None.
      scored: whether scores are passed as float32 [B].
      kept: whether the mask of rows that have a score is passed.
    """
    section, shapes = setup.config, Shapes(setup.policy.sharding)
    B, N = section.batch, section.max_new_tokens
    rollout, each = shapes.rollout(B, prompt, N, versions=True), shapes.rows(jnp.float32, B)
    T, split = prompt + N, rows_split(setup.policy.sharding)
    reference, weights = (strip_frozen(frozen, params) for params in (reference, weights))
    rows, turns = part_rows(B, T, section.micro_batch_tokens, *split)
    # A separate critic runs in scoring unless the update computes its values.
    critic = None if state.critic is None or setup.values_in_update else state.critic.params
    scoring = ExperienceArguments(
        setup=setup, recompute=setup.recomputes, scorer=scorer, reference_params=reference, policy_params=state.policy.params,
        critic_params=critic, scorer_params=weights, frozen=frozen, kl_coef=state.kl_coef, rollout=rollout,
        parts=shapes.parts(B, rows, turns, T), scores=each if scored else None,
        kept=shapes.rows(jnp.bool_, B) if kept else None, baseline=each if estimator_of(section).needs_greedy else None,
    )
    tokens = shapes.rows(jnp.float32, B, N)
    experience = Experience(rollout, each, *(tokens,) * 6)
    some, *checked, most = checked_rows(section, B, T, *split)
    checks = StepZeroArguments(
        setup=setup, params=state.policy.params, frozen=frozen, reference_params=reference, experience=experience,
        kl_coef=state.kl_coef, parts=scoring.parts, packed=shapes.parts(some, *checked, most, T), sampled=rollout.logprobs,
    )
    updates, size = section.epochs * section.minibatches, B // section.minibatches
    rows, learnt = part_rows(size, T, section.micro_batch_tokens, *split)
    update = UpdateArguments(
        setup=setup, batch=experience, order=shapes.whole(jnp.int32, updates, size),
        packed=shapes.parts(size, rows, learnt, T, updates), frozen=frozen,
        reference_params=reference if setup.loss_reads_reference else None,
    )
    return IterationShapes(scoring, checks, state, update, (turns, max(turns, most), learnt))


def compile_ahead(
    ahead: Ahead, setup: PPOSetup, engine: Engine, sampling: Sampling, prompts: Sequence[Sequence[int]], scores: Scores,
    frozen: Params | None = None, reference: Params | None = None, checked: bool = False,
) -> None:
    """Starts compiling the programs of an iteration, roughly in the order of their calls. Needs no weights.

    If describing a program fails, the error is logged, and the program is compiled at its first call.

    Args:
      ahead: compiles in threads.
      setup: models, optimizers and options.
      engine: the run's engine, as wide as the longest prompt.
      sampling: the sampling settings.
      prompts: token ids of the prompts of one iteration.
      scores: how the reward computes scores.
      frozen: ShapeDtypeStructs of the base under the adapters, or None.
      reference: ShapeDtypeStructs of the reference's parameters, with or without the base; None for those of `setup.reference`.
      checked: whether the step-0 checks will not run, because they have already or are switched off.
    """
    with log_errors("ppo"):
        state, needs_greedy = abstract_ppo_state(setup), estimator_of(setup.config).needs_greedy
        moves, policy = described_moves(setup.policy, join(frozen, state.policy.params))
        session = engine.start(policy, prompts, jax.random.key(0), sampling, range(len(prompts)))
        sampled = [*((step, arguments) for _, step, arguments in moves), *forecast(session)]
        scorer = scores if isinstance(scores, Scorer) and not needs_greedy else None
        weights = None if scorer is None else join(frozen, scorer.model.abstract())
        reference = join(setup.reference.abstract() if reference is None else reference, frozen or {})  # Its base is `frozen`.
        prompt = min(engine.bucket, engine.max_length - setup.config.max_new_tokens)
        host = scores == "host"
        shapes = iteration_shapes(setup, state, prompt, frozen, reference, scorer, weights, host, host)
        scoring = shapes.scoring
        if host:  # Such scores are numpy arrays, which have no sharding.
            each, kept = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (scoring.scores, scoring.kept))
            scoring = dataclasses.replace(scoring, scores=each, kept=kept)
        programs = []
        if scores != "unknown" and not needs_greedy:
            programs.append((packed_experience, (scoring,)))
        if not checked:
            programs.append((step_zero_values, (shapes.checks,)))
        programs.append((packed_update, (shapes.state, shapes.update)))
        # The update takes the longest to compile, so it comes right after the programs that sampling needs to start.
        chunks = [i for i, (step, _) in enumerate(sampled) if step in DECODING][:NUM_DECODE_PROGRAMS_COMPILED_FIRST]
        for step, arguments in (*sampled[: chunks[-1] + 1], *programs, *sampled[chunks[-1] + 1 :]):
            know(step, arguments)
            ahead.add(step, arguments)


def described_moves(model: Model, params: Params) -> tuple[list[tuple[list[int], Callable, tuple]], Params]:
    """(the programs that convert weights to the sampler's layout, the resulting abstract weights).

    A program is (indices of leaves, step, arguments); it converts a few leaves. params: ShapeDtypeStructs.
    """
    leaves, structure = jax.tree.flatten(params)
    targets, moves = jax.tree.leaves(model.generation_abstract(params)), []
    for group, step in model.generation_moves(params):
        moves.append((group, step, ([leaves[i] for i in group],)))
        for i in group:
            leaves[i] = targets[i]
    return moves, jax.tree.unflatten(structure, leaves)
