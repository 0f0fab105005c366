"""The programs of every stage except ppo: sampling and labelling, supervised training, preference models and direct preference
optimisation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxalign.config import BestOfN, Dpo, OnlineDpo, Optimizer, Pretrain, Sft
from jaxalign.models.adapters.lora import join
from jaxalign.models.model import Model
from jaxalign.planner.programs import (
    STEPS,
    STOP_IDS,
    Program,
    Run,
    judge_sampling,
    judging_programs,
    offloaded,
    sampling_programs,
    stacked_members,
)
from jaxalign.records import AnswerPairs, PackedBatch, PackedParts, PairBatch, ScoredPairs
from jaxalign.rewards.scorer import PairScoreArguments, Scorer, packed_rollout_scores, raw_pair_scores, student_model
from jaxalign.rollout.sampling import section_sampling
from jaxalign.training.arguments import DirectArguments, DistillArguments, LmArguments, LogprobArguments, PreferenceArguments
from jaxalign.training.direct_step import answer_logprobs, direct_step, sorts_the_batch
from jaxalign.training.distill_step import distill_step
from jaxalign.training.lm_step import lm_step
from jaxalign.training.optimizer import make_optimizer
from jaxalign.training.packed import pair_rows, part_rows, rows_split
from jaxalign.training.preference_step import preference_step
from jaxalign.training.state import abstract_state


def pretrain(run: Run) -> list[Program]:
    section = run.config.pretrain
    return [_lm(run, "pretrain", section, run.policy.base, section.steps)] if section.steps else []


def sft(run: Run) -> list[Program]:
    return [_lm(run, "sft", run.config.sft, run.policy, STEPS)]


def _lm(run: Run, stage: str, section: Pretrain | Sft | BestOfN, model: Model, steps: int) -> Program:
    optimizer = make_optimizer(section.optimizer, steps)
    state, shape = abstract_state(model, optimizer), (section.batch_rows, section.row_length)
    ids = run.rows(jnp.int32, *shape)
    batch = PackedBatch(ids, ids, ids, run.rows(jnp.float32, *shape))
    frozen, held = (None, {}) if model.lora is None else (run.frozen, run.base)
    parts = section.micro_batches or 1
    arguments = LmArguments(
        model=model,
        optimizer=optimizer,
        batch=batch,
        frozen=frozen,
        micro_batches=parts,
        balance_coef=run.config.model.load_balance_coef,
    )
    turns = model.head_chunks(section.batch_rows // parts, section.row_length - 1)
    return Program(stage, "update", "policy", lm_step, (state, arguments), held | trained_roles("policy", state), turns)


def trained_roles(role: str, state) -> dict:
    """A training state's parameters and optimizer state, by role."""
    return {role: state.params, f"{role} optimizer": state.opt_state}


def revise(run: Run) -> list[Program]:
    section, base, others = run.config.revise, _base(run), run.outside_judges("revise")
    held = {"base": base} | others
    found = sampling_programs(run, "revise", "base", run.policy, base, section, section.batch, held)
    for judge in run.judging("revise", run.policy, base) if others else ():
        found += judge_sampling(run, "revise", "revision", judge, section_sampling(section, STOP_IDS), section.batch, held)
    return found


def _base(run: Run):
    return run.policy.abstract() if run.frozen is None else run.frozen


def compare(run: Run) -> list[Program]:
    section, policy, base = run.config.compare, run.start("compare"), _base(run)
    held = run.base | ({"base": base} if run.judges("compare") else {}) | {"policy": run.own(policy)}
    held |= run.outside_judges("compare")
    sampled = sampling_programs(run, "compare", "policy", run.policy, policy, section, section.batch, held)
    return sampled + judging_programs(run, "compare", run.policy, base, section.batch, held)


def preference(run: Run) -> list[Program]:
    section, model = run.config.preference, run.policy.with_head("scalar")
    optimizer = make_optimizer(section.optimizer, STEPS)
    state = abstract_state(model, optimizer)
    batch = _packed(pair_batch(run, section.batch, section.max_length, section.margin_weight > 0))
    parts, most = _pair_parts(run, section.batch, section.max_length, section.micro_batch_tokens)
    arguments = PreferenceArguments(
        model=model,
        optimizer=optimizer,
        centering_coef=section.centering_coef,
        batch=batch,
        frozen=run.frozen,
        packed=parts,
    )
    held = run.base | trained_roles("preference model", state)
    held |= {"best preference model": state.params} if section.early_stopping else {}
    scorer, params = stacked_members(section, Scorer(model), join(run.frozen, model.abstract()))
    pairs = pair_batch(run, section.batch, section.max_length)
    return [
        Program("preference", "update", "preference model", preference_step, (state, arguments), held, most),
        _pair_scoring(run, "preference", scorer, params, pairs),
    ]


def _pair_scoring(run: Run, stage: str, scorer: Scorer, params, pairs: PairBatch) -> Program:
    """The program that scores a batch of pairs with a preference model."""
    parts, turns = _pair_parts(run, *pairs.tokens.shape[::2])
    arguments = PairScoreArguments(scorer=scorer, params=params, pairs=_packed(pairs), packed=parts)
    held = run.base | {"preference model": run.own(params)}
    return Program(stage, "scoring", "preference model", raw_pair_scores, (arguments,), held, turns)


def _packed(pairs: AnswerPairs | PairBatch):
    """The pairs without their tokens, which are in the packed rows instead."""
    return dataclasses.replace(pairs, tokens=None)


def _pair_parts(run: Run, pairs: int, T: int, tokens: int = 0, whole: bool = False) -> tuple[PackedParts, int]:
    """(the packed rows of `pairs` pairs of sequences of at most T tokens, the maximum number of parts).

    Args:
      run: the run.
      pairs: the number of pairs.
      T: the maximum length of a sequence.
      tokens: the maximum number of tokens per device in a part; 0 selects a default.
      whole: whether all pairs are in one part.
    """
    rows, most = pair_rows(pairs, T, tokens, *rows_split(run.policy.sharding), whole)
    return run.shapes.parts(2 * pairs, rows, most, T), most


def pair_batch(run: Run, rows: int, length: int, margin: bool = False) -> PairBatch:
    floats = run.rows(jnp.float32, rows)
    tokens, lengths = run.rows(jnp.int32, rows, 2, length), run.rows(jnp.int32, rows, 2)
    return PairBatch(tokens, lengths, floats, floats, floats if margin else None)


def reward_distill(run: Run) -> list[Program]:
    section, policy = run.config.reward_distill, run.start("reward_distill")
    held = run.base | {"policy": run.own(policy)}
    sampled = sampling_programs(run, "reward_distill", "policy", run.policy, policy, section, section.batch, held)
    student = student_model(section, run.policy)
    optimizer = make_optimizer(section.optimizer, STEPS)
    state = abstract_state(student, optimizer)
    pairs = pair_batch(run, section.batch_pairs, run.config.preference.max_length)
    scored = ScoredPairs(pairs.tokens, pairs.length, run.rows(jnp.float32, section.batch_pairs, 2))
    arguments = DistillArguments(
        model=student,
        optimizer=optimizer,
        objective=section.objective,
        scale=1.0,
        micro_batches=section.micro_batches,
        batch=scored,
    )
    scorer, teacher = preference_scorer(run)
    scoring = _pair_scoring(run, "reward_distill", scorer, teacher, pairs)
    held = scoring.held | trained_roles("student", state)
    return [
        *sampled,
        scoring,
        Program("reward_distill", "update", "student", distill_step, (state, arguments), held),
    ]


def preference_scorer(run: Run, clip: float | None = None):
    """(Scorer, weights) of the preference model, or of its ensemble if preference.members > 1."""
    model = run.policy.with_head("scalar")
    return stacked_members(run.config.preference, Scorer(model, clip=clip), join(run.frozen, model.abstract()))


def best_of_n(run: Run) -> list[Program]:
    section, policy = run.config.best_of_n, run.start("best_of_n")
    scorer, weights = preference_scorer(run)
    held = run.base | {"policy": run.own(policy), "preference model": run.own(weights)}
    return [
        *sampling_programs(run, "best_of_n", "policy", run.policy, policy, section, section.batch, held),
        scoring_program(run, "best_of_n", section, "preference model", scorer, weights, held),
        _lm(run, "best_of_n", section, run.policy, STEPS),
    ]


def scoring_program(run: Run, stage: str, section, role: str, scorer: Scorer, weights, held) -> Program:
    """The program that scores a batch of rollouts with a reward model. section: has batch and max_new_tokens."""
    N = section.max_new_tokens
    rollout = run.shapes.rollout(section.batch, run.prompt_length(N), N)
    T = rollout.tokens.shape[1]
    rows, most = part_rows(section.batch, T, 0, *rows_split(run.policy.sharding))
    parts = run.shapes.parts(section.batch, rows, most, T)
    return Program(stage, "reward", role, packed_rollout_scores, (scorer, weights, rollout, parts), held, most)


def dpo(run: Run) -> list[Program]:
    section, start = run.config.dpo, run.start("dpo")
    pairs = _answer_pairs(run, section.batch)
    reference = {"reference": run.own(start)}
    update = _direct(run, "dpo", section, section.optimizer, pairs, section.max_length, reference)
    if section.reference == "none":
        return [update]
    scored = LogprobArguments(model=run.policy, params=start, pairs=pairs, packed=update.arguments[1].packed)
    scoring = Program("dpo", "scoring", "reference", answer_logprobs, (scored,), run.base | reference, update.turns)
    return [scoring, update]


def _answer_pairs(run: Run, rows: int) -> AnswerPairs:
    sides, floats = run.rows(jnp.int32, rows, 2), run.rows(jnp.float32, rows)
    return AnswerPairs(None, sides, sides, floats, floats, run.rows(jnp.float32, rows, 2))


def _direct(run: Run, stage: str, section: Dpo, settings: Optimizer, pairs: AnswerPairs, T: int, held) -> Program:
    optimizer = make_optimizer(settings, STEPS)
    state = abstract_state(run.policy, optimizer)
    parts, most = _pair_parts(run, len(pairs.label), T, section.micro_batch_tokens, sorts_the_batch(section))
    arguments = DirectArguments(
        model=run.policy, optimizer=optimizer, section=section, batch=pairs, frozen=run.frozen, packed=parts
    )
    held = run.base | held | trained_roles("policy", state)
    return Program(stage, "update", "policy", direct_step, (state, arguments), held, most)


def online_dpo(run: Run) -> list[Program]:
    section: OnlineDpo = run.config.online_dpo
    start, base, size = run.start("online_dpo"), _base(run), section.batch // section.minibatches
    pairs, T = _answer_pairs(run, size), run.prompt_length(section.max_new_tokens) + section.max_new_tokens
    other = ({"feedback model": run.own(base)} if run.judges("online_dpo") else {}) | {"reference": run.own(start)}
    other |= run.outside_judges("online_dpo")
    update = _direct(run, "online_dpo", run.config.dpo, section.optimizer, pairs, T, other)
    state, arguments = update.arguments
    policy = join(run.frozen, state.params)
    scored = LogprobArguments(model=run.policy, params=policy, pairs=pairs, packed=arguments.packed)
    programs = [
        *sampling_programs(run, "online_dpo", "policy", run.policy, policy, section, 2 * size, update.held),
        *judging_programs(run, "online_dpo", run.policy, base, section.batch, update.held),
        Program("online_dpo", "scoring", "policy", answer_logprobs, (scored,), update.held, update.turns),
        update,
    ]
    return offloaded(run, programs)


def evaluate(run: Run) -> list[Program]:
    section, policy, start = run.config.evaluate, run.start("report"), run.start("preference")
    held = run.base | {"policy": run.own(policy), "reference": run.own(start)}
    made = []
    if "preference" in run.config.stages:
        scorer, weights = preference_scorer(run)
        held |= {"preference model": run.own(weights)}
        made = [scoring_program(run, "evaluate", section, "preference model", scorer, weights, held)]
    sampled = sampling_programs(run, "evaluate", "policy", run.policy, policy, section, section.batch, held)
    # The models that answered are freed before the judges of config.judge.path compare the answers.
    others = run.outside_judges("evaluate") if section.win_rate_prompts else {}
    judged = judging_programs(run, "evaluate", run.policy, _base(run), section.batch, others) if others else []
    return sampled + made + judged
