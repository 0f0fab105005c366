"""The programs that score responses outside the scoring program: one function for each reward source that runs a model."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.huggingface import read_config
from jaxalign.models.model import Model
from jaxalign.planner.programs import Program, Run, judging_programs
from jaxalign.planner.stage_programs import preference_scorer, scoring_program
from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.scorer import Scorer, raw_sequence_scores, student_model


def reward_programs(run: Run) -> tuple[list[Program], bool]:
    """(the programs of all parts of the reward, whether some rows may have no score)."""
    records = reward_records(run.config.reward.source)
    made = [record.load("programs") for record in records]
    return [program for programs in made if programs for program in programs(run)], not all(r.learnt for r in records)


def preference(run: Run) -> list[Program]:
    """The preference model, or all members of its ensemble."""
    section = run.config.ppo
    scorer, weights = preference_scorer(run, section.score_clip)
    own = {"preference model": run.own(weights)}
    return [scoring_program(run, "ppo", section, "preference model", scorer, weights, own)]


def distilled(run: Run) -> list[Program]:
    """The preference model's student."""
    section, student = run.config.ppo, student_model(run.config.reward_distill, run.policy)
    scorer, weights = Scorer(student, clip=section.score_clip), student.abstract()
    return [scoring_program(run, "ppo", section, "student", scorer, weights, {"student": weights})]


def ai_feedback(run: Run) -> list[Program]:
    """The feedback model's reasoning and ratings."""
    base = run.policy.abstract() if run.frozen is None else run.frozen
    own = {} if run.frozen is not None or not run.judges("ppo") else {"feedback model": base}
    own |= run.outside_judges("ppo")
    return list(judging_programs(run, "ppo", run.policy, base, run.config.ppo.batch, own))


def outside(run: Run) -> list[Program]:
    """The scores of `config.reward.model`. A text is assumed to have as many tokens in its tokenizer as in the policy's."""
    settings, sharding = run.config.reward, run.policy.sharding
    found = read_config(pathlib.Path(settings.model), settings.model_dtype, sharding.mesh.shape["tensor"])
    if found.head != "scalar":
        raise UserError(f"config.reward.model is {settings.model}, a {found.family.architecture}; expected a "
                        f"{found.family.classifier} with one label")
    model = Model(found.decoder, "scalar", sharding)

    def stored(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, settings.model_dtype, sharding=x.sharding)

    weights = jax.tree.map(stored, model.abstract())
    scorer = Scorer(model, settings.model_shift, settings.model_scale, run.config.ppo.score_clip)
    length = min(run.config.model.max_length, settings.model_max_length or found.max_positions or run.config.model.max_length)
    rows = -(-settings.model_batch // sharding.batch_size) * sharding.batch_size
    arguments = (scorer, weights, run.rows(jnp.int32, rows, length), run.rows(jnp.int32, rows))
    return [Program("ppo", "reward", "reward model", raw_sequence_scores, arguments, {"reward model": weights})]
