"""The programs that score responses outside the scoring program: one function for each reward source that runs a model."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from jaxalign.errors import UserError
from jaxalign.models.checkpoints.huggingface import read_config
from jaxalign.models.model import Model
from jaxalign.planner.programs import PlannedProgram, Run, verdict_tasks
from jaxalign.planner.stage_programs import preference_scorer, scoring_program
from jaxalign.registry.rewards import reward_records
from jaxalign.rewards.scorer import Scorer, raw_sequence_scores, student_model


def reward_programs(run: Run) -> tuple[list[PlannedProgram], bool]:
    """(the programs of all parts of the reward, whether some rows may have no score)."""
    records = reward_records(run.config.reward.source)
    loaded = [record.load("programs") for record in records]
    return [program for programs in loaded if programs for program in programs(run)], not all(r.learnt for r in records)


def preference(run: Run) -> list[PlannedProgram]:
    """The preference model, or all members of its ensemble."""
    section = run.config.ppo
    scorer, weights = preference_scorer(run, section.score_clip)
    own = {"preference model": run.own(weights)}
    return [scoring_program(run, "ppo", section, "preference model", scorer, weights, own)]


def distilled(run: Run) -> list[PlannedProgram]:
    """The preference model's student."""
    section, student = run.config.ppo, student_model(run.config.reward_distill, run.policy)
    scorer, weights = Scorer(student, clip=section.score_clip), student.abstract()
    return [scoring_program(run, "ppo", section, "student", scorer, weights, {"student": weights})]


def ai_feedback(run: Run) -> list[PlannedProgram]:
    """The feedback model's reasoning and ratings."""
    judges = run.judges("ppo")
    own = run.judge_weights(judges)
    tasks = verdict_tasks(run, "ppo", run.config.ppo.batch, judges, lambda: own)
    return [program for task in tasks for program in task.programs()]


def outside(run: Run) -> list[PlannedProgram]:
    """The scores of `config.reward.model`. A text is assumed to have as many tokens in its tokenizer as in the policy's."""
    settings, sharding = run.config.reward, run.policy.sharding
    checkpoint = read_config(pathlib.Path(settings.model), settings.model_dtype, sharding.mesh.shape["tensor"])
    if checkpoint.head != "scalar":
        raise UserError(f"config.reward.model is {settings.model}, a {checkpoint.family.architecture}; expected a "
                        f"{checkpoint.family.classifier} with one label")
    model = Model(checkpoint.decoder, "scalar", sharding)
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, settings.model_dtype, sharding=x.sharding), model.abstract())
    scorer = Scorer(model, settings.model_shift, settings.model_scale, run.config.ppo.score_clip)
    longest = run.config.model.max_length
    length = min(longest, settings.model_max_length or checkpoint.max_positions or longest)
    rows = -(-settings.model_batch // sharding.batch_size) * sharding.batch_size
    arguments = (scorer, weights, run.rows(jnp.int32, rows, length), run.rows(jnp.int32, rows))
    return [PlannedProgram("ppo", "reward", "reward model", raw_sequence_scores, arguments, {"reward model": weights})]
