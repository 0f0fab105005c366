"""The programs of stage ppo: sampling, the reward, scoring, the checks of step 0 and the update."""

from __future__ import annotations

import dataclasses

from jaxalign.models.adapters.lora import join
from jaxalign.planner.programs import Program, Run, offloaded, sampling_programs
from jaxalign.planner.reward_programs import reward_programs
from jaxalign.planner.stage_programs import trained_roles
from jaxalign.rewards.sums import fused_source
from jaxalign.rl.ahead import iteration_shapes
from jaxalign.rl.estimators import estimator_of
from jaxalign.rl.experience import packed_experience
from jaxalign.rl.state import abstract_ppo_state, make_ppo_setup
from jaxalign.rl.step_zero import step_zero_values
from jaxalign.rl.update import packed_update


def ppo(run: Run) -> list[Program]:
    """The programs, in the order in which an iteration calls them."""
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
    alone = fused_source(run.config.reward, run.config.mesh.offload) is not None
    scorer, weights = rewards[0].arguments[:2] if alone else (None, None)
    prompt = run.prompt_length(section.max_new_tokens)
    shapes = iteration_shapes(setup, state, prompt, run.frozen, reference, scorer, weights, not alone, kept)
    roles = "policy, critic" if setup.has_critic else "policy"
    scored = f"reference, {'policy' if setup.values_in_update else roles}" + (f", {rewards[0].role}" if alone else "")
    if alone and not estimator_of(section).needs_greedy:  # Greedy responses need their own reward program.
        rewards = []
    policy = join(run.frozen, state.policy.params)
    made = [
        *sampling_programs(run, "ppo", "policy", setup.policy, policy, section, section.batch, held),
        *rewards,
        Program("ppo", "scoring", scored, packed_experience, (shapes.scoring,), held, shapes.turns[0]),
        Program("ppo", "checks", "policy, reference", step_zero_values, (shapes.checks,), held, shapes.turns[1]),
        Program("ppo", "update", roles, packed_update, (shapes.state, shapes.update), held, shapes.turns[2]),
    ]
    return offloaded(run, [dataclasses.replace(program, held={**held, **program.held}) for program in made])
