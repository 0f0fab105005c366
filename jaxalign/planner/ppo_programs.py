"""The programs of stage ppo: sampling, the reward, scoring, the checks of step 0 and the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxalign.models.adapters.lora import apart, join
from jaxalign.models.model import Params
from jaxalign.planner.programs import Program, Run, offloaded, sampling_programs
from jaxalign.planner.reward_programs import is_fused, reward_programs
from jaxalign.planner.stage_programs import packed_parts, sampled_rollout, trained_roles
from jaxalign.records import Experience
from jaxalign.rewards.scorer import Scorer
from jaxalign.rl.checks import checked_rows, step_zero_values
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import packed_experience
from jaxalign.rl.state import PPOSetup, PPOState, abstract_ppo_state, make_ppo_setup
from jaxalign.rl.update import packed_update
from jaxalign.training.packed import part_rows, rows_split


@dataclasses.dataclass(frozen=True)
class Calls:
    """Arguments of what an iteration calls once it has sampled, and the most turns of each one's loop."""

    scoring: tuple
    checks: tuple
    update: tuple
    turns: tuple[int, int, int]


def iteration_calls(
    run: Run, setup: PPOSetup, state: PPOState, reference: Params, scorer: Scorer | None, weights: Params | None,
    scored: bool, kept: bool, place: Callable[[Any], Any] = lambda tree: tree,
) -> Calls:  # fmt: skip
    """reference, weights: joined with the base. scorer, weights: of the reward model that runs with all else, or None. scored,
    kept: scores are told, and which rows have one. place: puts what lies on a device there, where no mesh says so.
    """
    section = run.config.ppo
    B, N = section.batch, section.max_new_tokens
    rollout = sampled_rollout(run, B, N)
    T, split = rollout.tokens.shape[1], rows_split(run.policy.sharding)
    own = (apart(run.frozen, params) for params in (reference, weights))
    state, frozen, reference, weights = place((state, run.frozen, *own))
    rows, turns = part_rows(B, T, section.micro_batch_tokens, *split)
    parts = packed_parts(run, B, rows, turns, T)
    scoring = (
        setup, setup.recomputes, scorer, reference, state.policy.params, setup.critic_to_run(state), state.kl_coef, rollout,
        parts, run.rows(jnp.float32, B) if scored else None, run.rows(jnp.bool_, B) if kept else None,
        run.rows(jnp.float32, B) if estimator_of(section).needs_greedy else None, weights, frozen,
    )  # fmt: skip
    each, tokens = run.rows(jnp.float32, B), run.rows(jnp.float32, B, N)
    experience = place(Experience(rollout, each, *(tokens,) * 6))
    some, *checked, most = checked_rows(section, B, T, *split)
    packed = packed_parts(run, some, *checked, most, T)
    checks = setup, state.policy.params, frozen, reference, experience, state.kl_coef, packed, rollout.logprobs
    order = (section.epochs * section.minibatches, B // section.minibatches)
    rows, learnt = part_rows(order[1], T, section.micro_batch_tokens, *split)
    packed, read = packed_parts(run, order[1], rows, learnt, T, order[0]), reference if setup.loss_reads_reference else None
    update = setup, state, experience, run.scalar(jnp.int32, order), packed, frozen, read
    return Calls(scoring, checks, update, (turns, most, learnt))


def ppo(run: Run) -> list[Program]:
    """In the order in which an iteration calls them."""
    section = run.config.ppo
    setup = make_ppo_setup(section, run.policy)
    state = abstract_ppo_state(setup)
    reference = run.start("ppo")
    held = run.base | {"reference": run.own(reference)} | trained_roles("policy", state.policy)
    if state.critic is not None:
        held |= trained_roles("critic", state.critic)
    rewards, kept = reward_programs(run)
    for made in rewards:
        held |= made.held
    alone = is_fused(run.config)
    scorer, weights = rewards[0].arguments[:2] if alone else (None, None)
    calls = iteration_calls(run, setup, state, reference, scorer, weights, not alone, kept)
    roles = "policy, critic" if setup.has_critic else "policy"
    scored = f"reference, {'policy' if setup.values_in_update else roles}" + (f", {rewards[0].role}" if alone else "")
    if alone and not estimator_of(section).needs_greedy:  # Else the greedy responses are scored by themselves.
        rewards = []
    policy = join(run.frozen, state.policy.params)
    made = [
        *sampling_programs(run, "ppo", "policy", setup.policy, policy, section, section.batch, held),
        *rewards,
        Program("ppo", "scoring", scored, packed_experience, calls.scoring, held, calls.turns[0]),
        Program("ppo", "checks", "policy, reference", step_zero_values, calls.checks, held, calls.turns[1]),
        Program("ppo", "update", roles, packed_update, calls.update, held, calls.turns[2]),
    ]
    return offloaded(run, [dataclasses.replace(program, held={**held, **program.held}) for program in made])
