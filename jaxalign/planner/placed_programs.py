"""The jitted programs of a stage with roles on meshes of their own, for the compiler: those that `rl.placed` runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model, Params
from jaxalign.parallel.shapes import Shapes
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement import meshes as placement_meshes
from jaxalign.placement.slices import DeviceSlice
from jaxalign.planner.placed_tasks import MODELS
from jaxalign.planner.programs import PlannedProgram, Run, device_bytes, sampling_programs
from jaxalign.planner.reward_programs import reward_programs
from jaxalign.planner.stage_programs import online_dpo as direct_tasks
from jaxalign.rl.ahead import iteration_shapes
from jaxalign.rl.arguments import CriticArguments, RoleArguments
from jaxalign.rl.role_programs import critic_epochs, logprobs_of, policy_epochs, values_of
from jaxalign.rl.state import PPOSetup, PPOState, abstract_ppo_state, make_ppo_setup
from jaxalign.rl.step_zero import step_zero_values
from jaxalign.rl.update import packed_update
from jaxalign.steps.packed import part_rows, rows_split


@dataclasses.dataclass(frozen=True)
class PlacedRoles:
    """The mesh and the devices of each role."""

    shardings: Mapping[str, Sharding]
    devices: Mapping[str, DeviceSlice]

    def serving(self, role: str) -> str:
        """The role itself, or the one that it would shadow."""
        return role if role in self.shardings else MODELS[role]

    def held(self, role: str, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The arrays on the device of a role that has the most, by role. weights: those of each role, by name."""
        places = [place for place in self.devices.values() if self.devices[role].covers(place)]
        options = []
        for place in places:
            here = [name for name, other in self.devices.items() if other.covers(place)]
            options.append({key: tree for name in here for key, tree in weights.get(name, {}).items()})
        return max(options, key=lambda option: device_bytes(list(option.values())))


def ppo(run: Run, roles: PlacedRoles) -> Iterator[tuple[str, PlannedProgram]]:
    """(the role on whose devices it runs, the program) of stage ppo. run: with the policy on its mesh."""
    section = run.config.ppo
    setup = make_ppo_setup(section, run.policy, roles.shardings.get("critic"))
    state = abstract_ppo_state(setup)
    meshes = {run.policy.sharding: run}  # Roles with the same mesh share the base under adapters.
    runs = {role: meshes.setdefault(sharding, dataclasses.replace(run, policy=run.policy.on(sharding)))
            for role, sharding in roles.shardings.items()}
    params = _params(runs, state)
    rewards = reward_programs(runs["reward"])[0] if "reward" in runs else []
    weights = _weights(runs, params, state, rewards)
    held = functools.cache(lambda role: roles.held(role, weights))

    sampler = roles.serving("generator")
    own = runs[sampler]
    for program in sampling_programs(own, "ppo", sampler, own.policy, params[sampler], section, section.batch, held(sampler)):
        yield sampler, program
    scorer = setup.reference.on(roles.shardings["reference"])
    yield "reference", _pass(runs["reference"], logprobs_of, "reference", scorer, params["reference"], held("reference"))
    for program in rewards:
        yield "reward", dataclasses.replace(program, held={**held("reward"), **program.held})
    if setup.runs_critic:
        valuer = "policy" if setup.shares_trunk else roles.serving("value")
        critic = setup.critic.on(roles.shardings[valuer])
        yield valuer, _pass(runs[valuer], values_of, valuer, critic, params[valuer], held(valuer))
    if setup.recomputes:
        yield "policy", _pass(run, logprobs_of, "policy", setup.policy, params["policy"], held("policy"))
    yield from _updates(runs, setup, state, params, held)


def _params(runs: Mapping[str, Run], state: PPOState) -> dict[str, Params]:
    """The joined parameters of each role that has the policy's architecture."""
    heads = {"generator": "lm", "value": "scalar"}
    params = {role: join(runs[role].frozen, runs[role].policy.with_head(head).abstract())
              for role, head in heads.items() if role in runs}
    params |= {"policy": join(runs["policy"].frozen, state.policy.params), "reference": runs["reference"].start("ppo")}
    if state.critic is not None:
        params["critic"] = join(runs["critic"].frozen, state.critic.params)
    return params


def _weights(runs: Mapping[str, Run], params: Mapping[str, Params], state: PPOState,
             rewards: Sequence[PlannedProgram]) -> dict[str, dict[str, Any]]:
    """The arrays of each role during the whole stage, by name. The base under adapters counts once for each mesh."""
    weights: dict[str, dict[str, Any]] = {role: {} for role in runs}
    for role, run in runs.items():
        if run.frozen is not None:
            mesh = placement_meshes.text(dict(run.policy.sharding.mesh.shape))
            weights[role][f"base ({mesh})"] = run.frozen
        if role in params:
            weights[role][role] = run.own(params[role])
    weights["policy"]["policy optimizer"] = state.policy.opt_state
    if state.critic is not None:
        weights["critic"]["critic optimizer"] = state.critic.opt_state
    for program in rewards:
        weights["reward"] |= program.held
    return weights


def _pass(run: Run, step: Callable, role: str, model: Model, params: Params, held: Mapping[str, Any]) -> PlannedProgram:
    """A forward pass of one role over the rollout."""
    section, shapes = run.config.ppo, Shapes(model.sharding)
    B, N = section.batch, section.max_new_tokens
    prompt = run.longest_prompt(N)
    rows, turns = part_rows(B, prompt + N, section.micro_batch_tokens, *rows_split(model.sharding))
    arguments = RoleArguments(
        model=model, temperature=section.temperature or 1.0, params=params, rollout=shapes.rollout(B, prompt, N, versions=True),
        parts=shapes.parts(B, rows, turns, prompt + N),
    )
    return PlannedProgram("ppo", "scoring", role, step, (arguments,), held, turns)


def _updates(runs: Mapping[str, Run], setup: PPOSetup, state: PPOState, params: Mapping[str, Params],
             held: Callable[[str], Mapping[str, Any]]) -> Iterator[tuple[str, PlannedProgram]]:
    """The checks of step 0, with their copy of the reference, and the update: one program for the policy and the critic, or one
    for each if they have meshes of their own."""
    run = runs["policy"]
    same = runs["reference"] is run
    reference = params["reference"] if same else run.start("ppo")
    prompt = run.longest_prompt(setup.config.max_new_tokens)
    shapes = iteration_shapes(setup, state, prompt, run.frozen, reference, None, None, True, False)
    copy = {} if same else {"copy of the reference": run.own(reference)}
    if setup.config.checks.step_zero:
        yield "policy", PlannedProgram("ppo", "checks", "policy, reference", step_zero_values, (shapes.checks,),
                                       {**held("policy"), **copy}, shapes.turns[1])
    if not setup.critic_apart:
        roles = "policy, critic" if setup.has_critic else "policy"
        yield "policy", PlannedProgram("ppo", "update", roles, packed_update, (state, shapes.update), held("policy"),
                                       shapes.turns[2])
        return
    arguments = (state.policy, shapes.update, state.kl_coef, state.step)
    yield "policy", PlannedProgram("ppo", "update", "policy", policy_epochs, arguments, held("policy"), shapes.turns[2])
    there = dataclasses.replace(setup, policy=setup.policy.on(setup.critic.sharding))
    critic = iteration_shapes(there, abstract_ppo_state(there), prompt, None, reference, None, None, True, False)
    own = critic.update
    valued = CriticArguments(setup=setup, batch=own.batch, order=own.order, packed=own.packed, frozen=runs["critic"].frozen,
                             ran=Shapes(setup.critic.sharding).whole(jnp.float32, own.order.shape[0]))
    yield "critic", PlannedProgram("ppo", "update", "critic", critic_epochs, (state.critic, valued), held("critic"),
                                   critic.turns[2])


_OWNERS = {"policy": ("policy",), "policy optimizer": ("policy",), "reference": ("reference",)}
"""Of stage online_dpo, the roles whose devices hold an array; all other arrays than the base are those of judges."""


def online_dpo(run: Run, roles: PlacedRoles) -> Iterator[tuple[str, PlannedProgram]]:
    """As `ppo`, for stage online_dpo. Other roles on the same devices count with the mesh of the program's role."""
    for role, sharding in roles.shardings.items():
        sampling, judging, scoring, update = direct_tasks(dataclasses.replace(run, policy=run.policy.on(sharding)))
        tasks = {"generator": [sampling], "judge": [judging], "reference": [scoring], "policy": [scoring, update]}[role]
        if role == "policy" and roles.serving("generator") == role:
            tasks.insert(0, sampling)
        for program in (program for task in tasks for program in task.programs()):
            held = {name: tree for name, tree in program.held.items() if _is_here(name, role, roles)}
            if role == "reference":  # Its parameters are the argument.
                held.pop("reference", None)
            named = role if program.phase == "scoring" else "generator" if role == "generator" else program.role
            yield role, dataclasses.replace(program, role=named, held=held)


def _is_here(name: str, role: str, roles: PlacedRoles) -> bool:
    """Whether a device of a role holds an array of stage online_dpo."""
    if name.startswith(("base", "weights moved", "KV cache")) or name.endswith("for sampling"):
        return True
    owners = _OWNERS.get(name, ("judge",))
    if role == "generator" and name == "policy":
        return True  # Its copy of the weights.
    return any(roles.devices[role].overlaps(roles.devices[owner]) for owner in owners if owner in roles.devices)


PLACED_PROGRAMS = {"ppo": ppo, "online_dpo": online_dpo}
"""By stage, the function that yields its programs."""
