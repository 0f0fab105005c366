"""The tasks of stage ppo: sampling, the reward, scoring, the checks of step 0, and the update."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from jaxalign.models.adapters.lora import join
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.programs import PlannedProgram, Run, Task, offloaded, sampling_task, update_task
from jaxalign.planner.reward_programs import reward_programs
from jaxalign.planner.stage_programs import reward_roles, trained_roles
from jaxalign.rewards.sums import fused_source
from jaxalign.rl.ahead import iteration_shapes
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import packed_experience
from jaxalign.rl.state import abstract_ppo_state, make_ppo_setup, values_in_update
from jaxalign.rl.step_zero import checked_rows, step_zero_values
from jaxalign.rl.update import packed_update
from jaxalign.steps.packed import rows_split


def ppo(run: Run) -> list[Task]:
    """The tasks, in the order in which an iteration does them."""
    section, estimator = run.config.ppo, estimator_of(run.config.ppo)
    reward, new = reward_roles(run.config), section.max_new_tokens
    critic = ("critic",) if estimator.needs_critic and section.critic == "separate" else ()
    stays = ("policy", *critic, "reference", *reward)
    length = run.longest_prompt(new) + new
    part, parts = run.part(section.batch, length, section.micro_batch_tokens)
    packed = run.part(section.batch // section.minibatches, length, section.micro_batch_tokens)
    checked, _, apart = checked_rows(section, section.batch, length, *rows_split(run.policy.sharding))
    queues = section.iterations * (2 if estimator.needs_greedy else 1)
    recomputes = section.sampler_correction != "none" or estimator.needs_trainer_logprobs
    scored = ("reference", *(("policy",) if recomputes else ()), *(() if values_in_update(section) else critic))
    built = functools.cache(lambda: _programs(run))

    rewarded, fused = Task("ppo", programs=lambda: built().reward), None
    if reward:
        fused = fused_source(run.config.reward, run.config.mesh.offload)
        # A program of its own packs with the default size (`rewards.scorer.raw_rollout_scores`).
        rows, calls = run.part(section.batch, length) if fused is None else (part, parts)
        rewarded = dataclasses.replace(rewarded, phase="reward", runs=reward, rows=rows, calls=queues * calls, stays=stays)
    tasks = [
        sampling_task(run, "ppo", section, section.batch, queues, stays[1:], lambda: built().models),
        rewarded,
        Task("ppo", "score", scored, part, section.iterations * parts, stays, new, programs=lambda: built().score,
             fused=reward * run.config.preference.members if fused == "preference" else ()),
        Task("ppo", "checks", ("policy",), BatchShape(checked, length), 1, stays, new, micro=apart,
             programs=lambda: built().checks),
        update_task("ppo", ("policy", *critic), packed, section.iterations, lambda: built().update, stays, counted=new,
                    steps=section.epochs * section.minibatches),
    ]
    return [offloaded(run, task) for task in tasks if task.phase != "checks" or section.checks.step_zero]


class _Programs(NamedTuple):
    """The models of sampling, as `programs.Models` returns them, and the programs of the other tasks."""

    models: tuple
    reward: list[PlannedProgram]
    score: list[PlannedProgram]
    checks: list[PlannedProgram]
    update: list[PlannedProgram]


def _programs(run: Run) -> _Programs:
    section = run.config.ppo
    setup = make_ppo_setup(section, run.policy)
    state = abstract_ppo_state(setup)
    reference = run.start("ppo")
    held = run.base | {"reference": run.own(reference)} | trained_roles("policy", state.policy)
    if state.critic is not None:
        held |= trained_roles("critic", state.critic)
    rewards, kept = reward_programs(run)
    for program in rewards:
        held |= program.held
    fused = fused_source(run.config.reward, run.config.mesh.offload) is not None
    scorer, weights = rewards[0].arguments[:2] if fused else (None, None)
    prompt = run.longest_prompt(section.max_new_tokens)
    shapes = iteration_shapes(setup, state, prompt, run.frozen, reference, scorer, weights, not fused, kept)
    roles = "policy, critic" if setup.has_critic else "policy"
    scored = f"reference, {'policy' if setup.values_in_update else roles}" + (f", {rewards[0].role}" if fused else "")
    if fused and not estimator_of(section).needs_greedy:  # Greedy responses need their own reward program.
        rewards = []
    scoring, checks, update = shapes.turns
    return _Programs(
        (setup.policy, join(run.frozen, state.policy.params), held),
        [dataclasses.replace(program, held={**held, **program.held}) for program in rewards],
        [PlannedProgram("ppo", "scoring", scored, packed_experience, (shapes.scoring,), held, scoring)],
        [PlannedProgram("ppo", "checks", "policy, reference", step_zero_values, (shapes.checks,), held, checks)],
        [PlannedProgram("ppo", "update", roles, packed_update, (shapes.state, shapes.update), held, update)],
    )
