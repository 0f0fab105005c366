"""The tasks of every stage except ppo: sampling and labelling, supervised training, preference models and direct preference
optimisation."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxalign.config import BestOfNConfig, Config, DPOConfig, OnlineDPOConfig, Optimizer, PretrainConfig, SFTConfig, rounds
from jaxalign.feedback.rubrics import load_rubrics
from jaxalign.models.adapters.lora import join, trained
from jaxalign.models.model import Model, Params
from jaxalign.planner.judges import PlannedJudge
from jaxalign.planner.memory import BatchShape
from jaxalign.planner.programs import (
    STEPS,
    STOP_IDS,
    PlannedProgram,
    Run,
    Task,
    calls_for,
    judge_task,
    offloaded,
    sampling_programs,
    sampling_task,
    update_task,
    verdict_tasks,
)
from jaxalign.records import AnswerPairs, PackedBatch, PairBatch, ScoredPairs
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.rewards import reward_records
from jaxalign.registry.stages import stages_in_order
from jaxalign.rewards.scorer import Ensemble, PairScoreArguments, Scorer, packed_rollout_scores, raw_pair_scores, student_model
from jaxalign.rollout.sampling import section_sampling
from jaxalign.steps.arguments import DirectArguments, DistillArguments, LmArguments, LogprobArguments, PreferenceArguments
from jaxalign.steps.direct_step import answer_logprobs, direct_step, sorts_the_batch
from jaxalign.steps.lm_step import lm_step
from jaxalign.steps.optimizer import make_optimizer
from jaxalign.steps.preference_step import distill_step, preference_step
from jaxalign.steps.state import abstract_state


def pretrain(run: Run) -> list[Task]:
    section = run.config.pretrain
    return [lm_update(run, "pretrain", section, section.steps, run.policy.base, section.steps)]


def sft(run: Run) -> list[Task]:
    section = run.config.sft
    rows = None if run.examples is None else run.examples * section.epochs
    return [lm_update(run, "sft", section, section.steps or calls_for(rows, section.batch_rows), run.policy)]


def lm_update(run: Run, stage: str, section: PretrainConfig | SFTConfig | BestOfNConfig, calls: int | None, model: Model,
              steps: int = STEPS) -> Task:
    """Next-token training of the policy on packed rows.

    Args:
      run: the run.
      stage: the stage.
      section: a config section with optimizer, batch_rows, row_length and micro_batches.
      calls: the number of steps; None if unknown.
      model: the model that is trained.
      steps: the steps of the optimizer's schedule.
    """
    parts, shape = section.micro_batches or 1, (section.batch_rows, section.row_length)

    def programs():
        optimizer = make_optimizer(section.optimizer, steps)
        state, ids = abstract_state(model, optimizer), run.rows(jnp.int32, *shape)
        frozen, held = (None, {}) if model.lora is None else (run.frozen, run.base)
        arguments = LmArguments(
            model=model,
            optimizer=optimizer,
            batch=PackedBatch(ids, ids, ids, run.rows(jnp.float32, *shape)),
            frozen=frozen,
            micro_batches=parts,
            balance_coef=run.config.model.load_balance_coef,
        )
        held |= trained_roles("policy", state)
        turns = model.head_chunks(section.batch_rows // parts, section.row_length - 1)
        return [PlannedProgram(stage, "update", "policy", lm_step, (state, arguments), held, turns)]

    policy, rows, counted = ("policy",), BatchShape(*shape), section.row_length - 1
    return Task(stage, "update", policy, rows, calls, policy, counted, policy, parts, programs=programs)


def trained_roles(role: str, state) -> dict:
    """A training state's parameters and optimizer state, by role."""
    return {role: state.params, f"{role} optimizer": state.opt_state}


def revise(run: Run) -> list[Task]:
    section, judges = run.config.revise, _outside(run, "revise")
    asked = 2 * section.rounds * section.red_team_prompts  # Critiques and revisions.
    own = section.red_team_prompts + section.helpful_prompts + (asked if stage_judge(run.config, "revise").runs_base else 0)
    roles = tuple(judge.role for judge in judges)
    held = functools.cache(lambda: {"base": run.base_params} | run.judge_weights(judges))
    tasks = [sampling_task(run, "revise", section, section.batch, calls_for(own, section.batch), roles,
                           lambda: (run.policy, run.base_params, held()), "base")]
    if judges:  # The first member of a jury writes.
        sampling, calls = section_sampling(section, STOP_IDS), calls_for(asked, section.batch)
        tasks.append(judge_task(run, "revise", "revision", judges[0], sampling, section.batch, held, calls, ("policy", *roles)))
    return tasks


def _outside(run: Run, stage: str) -> list[PlannedJudge]:
    """The judges of a stage that are not the run's base."""
    return [] if stage_judge(run.config, stage).runs_base else run.judges(stage)


def compare(run: Run) -> list[Task]:
    section, judges = run.config.compare, run.judges("compare")
    roles = tuple(judge.role for judge in judges)
    # At most: each pair is shown in both orders, unless the first verdict is a tie.
    asked = 2 * section.prompts * run.config.feedback.principles_per_comparison * run.config.feedback.reasonings

    @functools.cache
    def models():
        policy = run.start("compare")
        base = {"base": run.base_params} if stage_judge(run.config, "compare").runs_base else run.judge_weights(judges)
        return run.policy, policy, run.base | base | {"policy": run.own(policy)}

    calls = calls_for(section.samples * section.prompts, section.batch)
    return [
        sampling_task(run, "compare", section, section.batch, calls, roles, models),
        *verdict_tasks(run, "compare", section.batch, judges, lambda: models()[2], asked, ("policy", *roles)),
    ]


def _pairs(run: Run) -> int | None:
    """The number of training pairs: the pairs that stage compare labels, or the rows of the data file."""
    compared = "compare" in run.config.stages or data_source(run.config).feedback
    return run.config.compare.prompts if compared else run.examples


def preference(run: Run) -> list[Task]:
    section, pairs, role = run.config.preference, _pairs(run), "preference model"
    model = run.policy.with_head("scalar")
    learnt = None if pairs is None else pairs * (1 - section.held_out_share) * section.epochs * section.members
    steps = section.steps * section.members or calls_for(learnt, section.batch)
    packed = run.pair_part(section.batch, section.max_length, section.micro_batch_tokens)

    def update():
        optimizer = make_optimizer(section.optimizer, STEPS)
        state = abstract_state(model, optimizer)
        pairs_batch = pair_batch(run, section.batch, section.max_length, section.margin_weight > 0)
        arguments = PreferenceArguments(
            model=model,
            optimizer=optimizer,
            centering_coef=section.centering_coef,
            batch=dataclasses.replace(pairs_batch, tokens=None),  # The packed rows have the tokens.
            frozen=run.frozen,
            packed=_pair_parts(run, section.batch, packed),
        )
        held = run.base | trained_roles(role, state)
        held |= {f"best {role}": state.params} if section.early_stopping else {}
        return [PlannedProgram("preference", "update", role, preference_step, (state, arguments), held, packed[1])]

    pairs_to_score = functools.partial(pair_batch, run, section.batch, section.max_length)
    return [
        update_task("preference", (role,), packed, steps, update, unit=2),
        Task("preference", programs=lambda: [_pair_scoring(run, "preference", pairs_to_score())]),
    ]


def _pair_scoring(run: Run, stage: str, pairs: PairBatch) -> PlannedProgram:
    """The program that scores a batch of pairs with the preference model."""
    scorer, params = preference_scorer(run)
    packed = run.pair_part(*pairs.tokens.shape[::2])
    parts = _pair_parts(run, len(pairs.tokens), packed)
    packed_pairs = dataclasses.replace(pairs, tokens=None)  # The packed rows have the tokens.
    arguments = PairScoreArguments(scorer=scorer, params=params, pairs=packed_pairs, packed=parts)
    held = run.base | {"preference model": run.own(params)}
    return PlannedProgram(stage, "scoring", "preference model", raw_pair_scores, (arguments,), held, packed[1])


def _pair_parts(run: Run, pairs: int, packed: tuple[BatchShape, int]):
    """The packed rows of `pairs` pairs of sequences, with the shape that `Run.pair_part` returned."""
    part, most = packed
    return run.shapes.parts(2 * pairs, part.rows, most, part.length)


def pair_batch(run: Run, rows: int, length: int, margin: bool = False) -> PairBatch:
    floats = run.rows(jnp.float32, rows)
    tokens, lengths = run.rows(jnp.int32, rows, 2, length), run.rows(jnp.int32, rows, 2)
    return PairBatch(tokens, lengths, floats, floats, floats if margin else None)


def reward_distill(run: Run) -> list[Task]:
    def programs():
        section, policy = run.config.reward_distill, run.start("reward_distill")
        held = run.base | {"policy": run.own(policy)}
        sampled = sampling_programs(run, "reward_distill", "policy", run.policy, policy, section, section.batch, held)
        student = student_model(section, run.policy)
        optimizer = make_optimizer(section.optimizer, STEPS)
        state = abstract_state(student, optimizer)
        pairs = pair_batch(run, section.batch_pairs, run.config.preference.max_length)
        arguments = DistillArguments(
            model=student,
            optimizer=optimizer,
            objective=section.objective,
            scale=1.0,
            micro_batches=section.micro_batches,
            batch=ScoredPairs(pairs.tokens, pairs.length, run.rows(jnp.float32, section.batch_pairs, 2)),
        )
        scoring = _pair_scoring(run, "reward_distill", pairs)
        held = scoring.held | trained_roles("student", state)
        update = PlannedProgram("reward_distill", "update", "student", distill_step, (state, arguments), held)
        return [*sampled, scoring, update]

    return [Task("reward_distill", programs=programs)]


def preference_scorer(run: Run, clip: float | None = None) -> tuple[Scorer, Params]:
    """(Scorer, weights) of the preference model, or of its ensemble if preference.members > 1. Each leaf of an ensemble is
    [K, ...], except the base that members with adapters share."""
    section, model = run.config.preference, run.policy.with_head("scalar")
    scorer, params, K = Scorer(model, clip=clip), join(run.frozen, model.abstract()), section.members
    if K == 1:
        return scorer, params

    def stack(leaf: jax.ShapeDtypeStruct):
        members = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((K, *leaf.shape), leaf.dtype, sharding=members)

    ensemble = Ensemble((0.0,) * K, (1.0,) * K, section.combine, section.std_weight)
    own = trained(params) if "adapters" in params else params
    return dataclasses.replace(scorer, ensemble=ensemble), {**params, **jax.tree.map(stack, own)}


def best_of_n(run: Run) -> list[Task]:
    section, stays = run.config.best_of_n, ("policy", "preference model")
    calls = calls_for(section.prompts * section.n, section.batch)
    rows = BatchShape(section.batch, run.longest_prompt(section.max_new_tokens) + section.max_new_tokens)
    scorer = functools.cache(lambda: preference_scorer(run))

    @functools.cache
    def models():
        policy = run.start("best_of_n")
        held = run.base | {"policy": run.own(policy), "preference model": run.own(scorer()[1])}
        return run.policy, policy, held

    steps = calls_for(section.prompts * section.epochs, section.batch_rows)
    return [
        sampling_task(run, "best_of_n", section, section.batch, calls, stays[1:], models),
        Task("best_of_n", "score", ("preference model",), rows, calls, stays, programs=lambda: [
            scoring_program(run, "best_of_n", section, "preference model", *scorer(), models()[2])
        ]),
        lm_update(run, "best_of_n", section, steps, run.policy),
    ]


def scoring_program(run: Run, stage: str, section, role: str, scorer: Scorer, weights, held) -> PlannedProgram:
    """The program that scores a batch of rollouts with a reward model. section: has batch and max_new_tokens."""
    N = section.max_new_tokens
    rollout = run.shapes.rollout(section.batch, run.longest_prompt(N), N)
    part, most = run.part(section.batch, rollout.tokens.shape[1])
    parts = run.shapes.parts(section.batch, part.rows, most, part.length)
    return PlannedProgram(stage, "reward", role, packed_rollout_scores, (scorer, weights, rollout, parts), held, most)


def dpo(run: Run) -> list[Task]:
    section, pairs = run.config.dpo, _pairs(run)
    packed = run.pair_part(section.batch, section.max_length, section.micro_batch_tokens, sorts_the_batch(section))
    rows, parts = packed
    stays = ("policy", "reference") if section.reference == "start" else ("policy",)

    start = functools.cache(lambda: run.start("dpo"))
    update = functools.cache(
        lambda: _direct(run, "dpo", section.optimizer, section.batch, packed, {"reference": run.own(start())})
    )

    calls = None if pairs is None else parts * calls_for(pairs, section.batch)
    steps = section.steps or calls_for(None if pairs is None else pairs * section.epochs, section.batch)
    scored = Task("dpo", "score", ("reference",), rows, calls, stays, section.max_length, programs=lambda: [
        _logprobs(run, update(), "reference", start(), run.base | {"reference": run.own(start())})
    ])
    learnt = update_task("dpo", ("policy",), packed, steps, lambda: [update()], stays, counted=section.max_length, unit=2)
    return [scored, learnt] if section.reference == "start" else [learnt]


def _direct(run: Run, stage: str, settings: Optimizer, batch: int, packed: tuple[BatchShape, int], held) -> PlannedProgram:
    """The update of direct preference optimisation on `batch` pairs."""
    section: DPOConfig = run.config.dpo
    optimizer = make_optimizer(settings, STEPS)
    state = abstract_state(run.policy, optimizer)
    sides, floats = run.rows(jnp.int32, batch, 2), run.rows(jnp.float32, batch)
    pairs = AnswerPairs(None, sides, sides, floats, floats, run.rows(jnp.float32, batch, 2))
    arguments = DirectArguments(
        model=run.policy, optimizer=optimizer, section=section, batch=pairs, frozen=run.frozen,
        packed=_pair_parts(run, batch, packed),
    )
    held = run.base | held | trained_roles("policy", state)
    return PlannedProgram(stage, "update", "policy", direct_step, (state, arguments), held, packed[1])


def _logprobs(run: Run, update: PlannedProgram, role: str, params, held) -> PlannedProgram:
    """The program that computes the log-probs of a model's responses in the batch of an update."""
    arguments = update.arguments[1]
    scored = LogprobArguments(model=run.policy, params=params, pairs=arguments.batch, packed=arguments.packed)
    return PlannedProgram(update.stage, "scoring", role, answer_logprobs, (scored,), held, update.turns)


def online_dpo(run: Run) -> list[Task]:
    section: OnlineDPOConfig = run.config.online_dpo
    size, length = section.batch // section.minibatches, run.longest_prompt(section.max_new_tokens) + section.max_new_tokens
    packed = run.pair_part(size, length, run.config.dpo.micro_batch_tokens, sorts_the_batch(run.config.dpo))
    rows, parts = packed
    stays, calls = ("reference", *reward_roles(run.config)), section.iterations * section.minibatches
    judges = functools.cache(lambda: run.judges("online_dpo"))

    @functools.cache
    def models():
        held = {"reference": run.own(run.start("online_dpo"))} | run.judge_weights(judges())
        update = _direct(run, "online_dpo", section.optimizer, size, packed, held)
        return update, (run.policy, join(run.frozen, update.arguments[0].params), update.held)

    def judging():
        tasks = verdict_tasks(run, "online_dpo", section.batch, judges(), lambda: models()[1][2])
        return [program for task in tasks for program in task.programs()]

    def scoring():
        update, (_, policy, held) = models()
        return [_logprobs(run, update, "policy", policy, held)]

    everything = ("policy", *stays)
    tasks = [
        sampling_task(run, "online_dpo", section, 2 * size, calls, stays, lambda: models()[1]),
        Task("online_dpo", programs=judging),
        Task("online_dpo", "score", ("reference",), rows, calls * parts, everything, length, programs=scoring),
        update_task("online_dpo", ("policy",), packed, calls * section.epochs, lambda: [models()[0]], everything,
                    counted=length, unit=2),
    ]
    return [offloaded(run, task) for task in tasks]


def reward_roles(config: Config) -> tuple[str, ...]:
    """The roles of the learnt reward models in the reward."""
    return ("preference model",) if any(record.learnt for record in reward_records(config.reward.source)) else ()


def evaluate(run: Run) -> list[Task]:
    section, models = run.config.evaluate, evaluated_models(run.config)
    calls = models * calls_for(section.prompts, section.batch)
    asked = 2 * math.comb(models, 2) * min(section.win_rate_prompts, section.prompts)
    asked += rated_answers(run.config)
    judges = _outside(run, "evaluate") if asked else []
    scores = "preference" in run.config.stages
    beside = ("reference", *(("preference model",) if scores else ()))
    scorer = functools.cache(lambda: preference_scorer(run))

    @functools.cache
    def answering():
        policy, start = run.start("report"), run.start("preference")
        held = run.base | {"policy": run.own(policy), "reference": run.own(start)}
        held |= {"preference model": run.own(scorer()[1])} if scores else {}
        return run.policy, policy, held

    # The models that answered are freed before the judges of config.judge.path compare the answers.
    roles = tuple(judge.role for judge in judges)
    scored = Task("evaluate", programs=lambda: [
        scoring_program(run, "evaluate", section, "preference model", *scorer(), answering()[2])
    ])
    return [
        sampling_task(run, "evaluate", section, section.batch, calls, beside, answering),
        *([scored] if scores else []),
        *verdict_tasks(run, "evaluate", section.batch, judges, lambda: run.judge_weights(judges), asked, roles),
    ]


def rated_answers(config: Config) -> int:
    """The ratings by rubrics that stage evaluate asks for, at most: the kinds of the prompts are not known."""
    section = config.evaluate
    return evaluated_models(config) * section.prompts * len(load_rubrics(section.rubrics)) if section.rubrics else 0


def evaluated_models(config: Config) -> int:
    """The number of models that stage evaluate measures; it compares each pair of them."""
    policies = sum(record.makes_policy for record in stages_in_order(config.stages))
    return 1 + policies + len(rounds.later_policies(config))
