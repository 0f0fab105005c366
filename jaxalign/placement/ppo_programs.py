"""The programs of stage ppo: sampling, the reward, scoring, the checks of step 0 and the update."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError
from jaxalign.models.huggingface import read_config
from jaxalign.models.lora import join
from jaxalign.models.model import Model
from jaxalign.placement.programs import Program, Run, judging_programs, offloaded, sampling_programs
from jaxalign.placement.stage_programs import preference_scorer, sampled_rollout, trained_roles
from jaxalign.records import Experience
from jaxalign.training.checks import step_zero_values
from jaxalign.training.experience import make_experience
from jaxalign.training.ppo_state import abstract_ppo_state, make_ppo_setup
from jaxalign.training.ppo_step import ppo_update
from jaxalign.training.scorer import Scorer, raw_sequence_scores, rollout_scores, student_model

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
    policy = join(run.frozen, state.policy.params)
    critic = policy if setup.shares_trunk else None if state.critic is None else join(run.frozen, state.critic.params)
    rollout = sampled_rollout(run, section.batch, section.max_new_tokens)
    scores = run.rows(jnp.float32, section.batch)
    scoring = (
        setup, setup.recomputes, reference, policy, critic, state.kl_coef, rollout, scores,
        run.rows(jnp.bool_, section.batch) if kept else None, scores if section.advantages == "remax" else None,
    )  # fmt: skip
    floats = run.rows(jnp.float32, section.batch, section.max_new_tokens)
    experience = Experience(rollout, scores, *(floats,) * 6)
    update = (setup, state, experience, run.frozen, reference if setup.loss_reads_reference else None)
    checks = (setup, state.policy.params, run.frozen, reference, experience, state.kl_coef)
    roles = "policy, critic" if setup.has_critic else "policy"
    made = [
        *sampling_programs(run, "ppo", "policy", setup.policy, policy, section, section.batch, held),
        *rewards,
        Program("ppo", "scoring", f"reference, {roles}", make_experience, scoring, held),
        Program("ppo", "checks", "policy, reference", step_zero_values, checks, held),
        Program("ppo", "update", roles, ppo_update, update, held),
    ]
    return offloaded(run, [dataclasses.replace(program, held={**held, **program.held}) for program in made])


def _rewards(run: Run, held) -> tuple[list[Program], bool]:
    """(the programs of the reward's parts that have a model, whether a row may be without a score)."""
    config, section, made = run.config, run.config.ppo, []
    parts = config.reward.source.split("+")
    rollout = sampled_rollout(run, section.batch, section.max_new_tokens)
    if "preference" in parts:
        scorer, weights = preference_scorer(run, section.score_clip)
        own = {"preference model": run.own(weights)}
        made.append(Program("ppo", "reward", "preference model", rollout_scores, (scorer, weights, rollout), own))
    if "distilled" in parts:
        student = student_model(config.reward_distill, run.policy)
        scorer, weights = Scorer(student, clip=section.score_clip), student.abstract()
        made.append(Program("ppo", "reward", "student", rollout_scores, (scorer, weights, rollout), {"student": weights}))
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
