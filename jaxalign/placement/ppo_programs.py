"""The programs of stage ppo: sampling, the reward, scoring, the checks of step 0 and the update."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jaxalign.config import Config
from jaxalign.errors import UserError
from jaxalign.models.huggingface import read_config
from jaxalign.models.lora import apart, join
from jaxalign.models.model import Model
from jaxalign.placement.programs import Program, Run, judging_programs, offloaded, sampling_programs
from jaxalign.placement.stage_programs import packed_parts, preference_scorer, sampled_rollout, scoring_program, trained_roles
from jaxalign.records import Experience
from jaxalign.training.checks import checked_rows, step_zero_values
from jaxalign.training.experience import packed_experience
from jaxalign.training.packed import part_rows, rows_split
from jaxalign.training.ppo_state import abstract_ppo_state, make_ppo_setup
from jaxalign.training.ppo_step import packed_update
from jaxalign.training.scorer import Scorer, raw_sequence_scores, student_model

LEARNT = ("preference", "distilled")


def ppo(run: Run) -> list[Program]:
    """In the order in which an iteration calls them."""
    section = run.config.ppo
    setup = make_ppo_setup(section, run.policy)
    state = abstract_ppo_state(setup)
    reference = run.start("ppo")
    held = run.base | {"reference": run.own(reference)} | trained_roles("policy", state.policy)
    if state.critic is not None:
        held |= trained_roles("critic", state.critic)
    rewards, kept = _rewards(run, held)
    for made in rewards:
        held |= made.held
    alone = _scored_with_all_else(run.config)
    policy = join(run.frozen, state.policy.params)
    critic = setup.critic_to_run(state)
    rollout = sampled_rollout(run, section.batch, section.max_new_tokens)
    scores = run.rows(jnp.float32, section.batch)
    T, split = rollout.tokens.shape[1], rows_split(run.policy.sharding)
    rows, turns = part_rows(section.batch, T, section.micro_batch_tokens, *split)
    parts = packed_parts(run, section.batch, rows, turns, T)
    scorer, weights = rewards[0].arguments[:2] if alone else (None, None)
    own_reference, weights = (apart(run.frozen, params) for params in (reference, weights))
    scoring = (
        setup, setup.recomputes, scorer, own_reference, state.policy.params, critic, state.kl_coef, rollout, parts,
        None if alone else scores, run.rows(jnp.bool_, section.batch) if kept else None,
        scores if section.advantages == "remax" else None, weights, run.frozen,
    )  # fmt: skip
    floats = run.rows(jnp.float32, section.batch, section.max_new_tokens)
    experience = Experience(rollout, scores, *(floats,) * 6)
    order = (section.epochs * section.minibatches, section.batch // section.minibatches)
    rows, part_turns = part_rows(order[1], T, section.micro_batch_tokens, *split)
    packed = packed_parts(run, order[1], rows, part_turns, T, order[0])
    update = (
        setup, state, experience, run.scalar(jnp.int32, order), packed, run.frozen,
        own_reference if setup.loss_reads_reference else None,
    )  # fmt: skip
    some, rows, most = checked_rows(section, section.batch, T, *split)
    checked = packed_parts(run, some, rows, most, T)
    checks = (setup, state.policy.params, run.frozen, own_reference, experience, state.kl_coef, checked, rollout.logprobs)
    roles = "policy, critic" if setup.has_critic else "policy"
    scored = f"reference, {'policy' if setup.values_in_update else roles}" + (f", {rewards[0].role}" if alone else "")
    if alone and section.advantages != "remax":  # Else the greedy responses are scored by themselves.
        rewards = []
    made = [
        *sampling_programs(run, "ppo", "policy", setup.policy, policy, section, section.batch, held),
        *rewards,
        Program("ppo", "scoring", scored, packed_experience, scoring, held, turns),
        Program("ppo", "checks", "policy, reference", step_zero_values, checks, held, most),
        Program("ppo", "update", roles, packed_update, update, held, part_turns),
    ]
    return offloaded(run, [dataclasses.replace(program, held={**held, **program.held}) for program in made])


def _scored_with_all_else(config: Config) -> bool:
    """Whether a learnt reward is all there is, and may be there beside the reference."""
    reward = config.reward
    by_itself = reward.source in LEARNT and reward.weights in ((), (1.0,)) and not reward.length_coef
    return by_itself and "frozen" not in config.mesh.offload


def _rewards(run: Run, held) -> tuple[list[Program], bool]:
    """(the programs of the reward's parts that have a model, whether a row may be without a score)."""
    config, section, made = run.config, run.config.ppo, []
    parts = config.reward.source.split("+")
    if "preference" in parts:
        scorer, weights = preference_scorer(run, section.score_clip)
        own = {"preference model": run.own(weights)}
        made.append(scoring_program(run, "ppo", section, "preference model", scorer, weights, own))
    if "distilled" in parts:
        student = student_model(config.reward_distill, run.policy)
        scorer, weights = Scorer(student, clip=section.score_clip), student.abstract()
        made.append(scoring_program(run, "ppo", section, "student", scorer, weights, {"student": weights}))
    if "model" in parts:
        made.append(_outside(run))
    if "ai_feedback" in parts:
        base = run.policy.abstract() if run.frozen is None else run.frozen
        own = {} if run.frozen is not None else {"feedback model": base}
        made += judging_programs(run, "ppo", run.policy, base, section.batch, own)
    return made, any(part not in LEARNT for part in parts)


def _outside(run: Run) -> Program:
    """The scores of config.reward.model, for texts that have as many tokens for it as for the policy."""
    settings, sharding = run.config.reward, run.policy.sharding
    tensor, parts = (1, 1) if sharding is None else (sharding.mesh.shape["tensor"], sharding.batch_size)
    found = read_config(pathlib.Path(settings.model), settings.model_dtype, tensor)
    if found.head != "scalar":
        raise UserError(f"config.reward.model is {settings.model}, a {found.family.architecture}; a {found.family.classifier} "
                        "with one label is expected")
    model = Model(found.decoder, "scalar", sharding)
    stored = lambda x: jax.ShapeDtypeStruct(x.shape, settings.model_dtype, sharding=x.sharding)  # noqa: E731
    weights = jax.tree.map(stored, model.abstract())
    scorer = Scorer(model, settings.model_shift, settings.model_scale, run.config.ppo.score_clip)
    length = min(run.config.model.max_length, settings.model_max_length or found.max_positions or run.config.model.max_length)
    rows = -(-settings.model_batch // parts) * parts
    arguments = (scorer, weights, run.rows(jnp.int32, rows, length), run.rows(jnp.int32, rows))
    return Program("ppo", "reward", "reward model", raw_sequence_scores, arguments, {"reward model": weights})
