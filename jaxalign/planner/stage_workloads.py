"""The tasks of each built-in stage: the `workload` of its record.

Each function takes the config, the tokens of the longest prompt (None: model.max_length minus the response) and the number of
rows of the data file (None: unknown), and returns the stage's tasks.
"""

from __future__ import annotations

from jaxalign.config import Config, rounds
from jaxalign.planner import judges
from jaxalign.planner.memory import Rows
from jaxalign.planner.workload import (
    Task,
    calls_for,
    generate,
    lm_update,
    packed_parts,
    packed_update,
    prompt_length,
)
from jaxalign.registry.advantages import ADVANTAGES
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.judges import stage_judge
from jaxalign.registry.rewards import reward_records
from jaxalign.registry.stages import stages_in_order
from jaxalign.rl.state import values_in_update
from jaxalign.training.direct_step import sorts_the_batch


def pretrain(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section = config.pretrain
    return [lm_update("pretrain", section.batch_rows, section.row_length, section.micro_batches, section.steps)]


def sft(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section = config.sft
    calls = calls_for(None if examples is None else examples * section.epochs, section.batch_rows)
    return [lm_update("sft", section.batch_rows, section.row_length, section.micro_batches, calls)]


def revise(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section, others = config.revise, judges.roles(config, "revise")
    asked = 2 * section.rounds * section.red_team_prompts  # Critiques and revisions.
    answers = section.red_team_prompts + section.helpful_prompts
    calls = calls_for(answers + (asked if stage_judge(config, "revise").runs_base else 0), section.batch)
    found = [generate(config, "revise", section.batch, section.max_new_tokens, prompt, calls, others)]
    if others:  # The first member of a jury writes.
        found.append(_judged(config, "revise", others[0], section.batch, section.max_new_tokens,
                             calls_for(asked, section.batch), ("policy", *others)))
    return found


def compare(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section, others = config.compare, judges.roles(config, "compare")
    labelling = others or (("labeller",) if stage_judge(config, "compare").runs_base else ())
    # At most: each pair is shown in both orders, unless the first verdict is a tie.
    asked = 2 * section.prompts * config.feedback.principles_per_comparison * config.feedback.reasonings
    found = [generate(config, "compare", section.batch, section.max_new_tokens, prompt,
                      calls_for(section.samples * section.prompts, section.batch), labelling)]
    return found + _verdicts(config, "compare", section.batch, asked, labelling, ("policy", *labelling), prompt)


def _verdicts(
    config: Config, stage: str, batch: int, asked: int, roles: tuple[str, ...], stays: tuple[str, ...], prompt: int | None
) -> list[Task]:
    """The tasks of the judges `roles` for `asked` comparisons each: their reasoning, if they reason, and their verdicts."""
    found, calls, new = [], calls_for(asked, batch), config.feedback.max_reasoning_tokens
    for role in roles:
        if config.feedback.reasons(config) and role.startswith(judges.ROLE):
            found.append(_judged(config, stage, role, batch, new, calls, stays))
        elif config.feedback.reasons(config):
            found.append(generate(config, stage, batch, new, prompt, calls, stays, role))
        found.append(Task(stage, "score", (role,), (), stays, Rows(batch, _request_length(config, role)), 1, calls))
    return found


def _judged(
    config: Config, stage: str, role: str, batch: int, new: int, calls: int | None, stays: tuple[str, ...]
) -> Task:
    """Sampling of `new` tokens by a judge after its longest request."""
    return Task(stage, "generate", (role,), (), stays, Rows(batch, _request_length(config, role) - new, new), 1, calls)


def _request_length(config: Config, role: str) -> int:
    """Tokens of a judge's longest request with its text."""
    if role.startswith(judges.ROLE):
        return judges.judge_model(config, role, None)[1]
    return config.judge.local_length(config)


def _pairs(config: Config, examples: int | None) -> int | None:
    """The number of training pairs: the pairs that stage compare labels, or the rows of the data file."""
    compared = "compare" in config.stages or data_source(config).feedback
    return config.compare.prompts if compared else examples


def preference(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section, pairs, role = config.preference, _pairs(config, examples), ("preference model",)
    learnt = None if pairs is None else pairs * (1 - section.held_out_share) * section.epochs * section.members
    packed = packed_parts(config, section.batch, section.max_length, section.micro_batch_tokens, pairs=True)
    return [packed_update("preference", role, role, packed, 0, calls_for(learnt, section.batch))]


def dpo(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section, pairs = config.dpo, _pairs(config, examples)
    packed = packed_parts(config, section.batch, section.max_length, section.micro_batch_tokens, pairs=True,
                          whole=sorts_the_batch(section))
    rows, parts = packed
    reference = section.reference == "start"
    steps = calls_for(None if pairs is None else pairs * section.epochs, section.batch)
    stays = ("policy", "reference") if reference else ("policy",)
    scoring = Task("dpo", "score", ("reference",), (), stays, rows, section.max_length,
                   None if pairs is None else parts * calls_for(pairs, section.batch))
    update = packed_update("dpo", ("policy",), stays, packed, section.max_length, steps)
    return [scoring, update] if reference else [update]


def online_dpo(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section = config.online_dpo
    stays = ("policy", "reference", *_reward_roles(config))
    length = prompt_length(config, section.max_new_tokens, prompt) + section.max_new_tokens
    pairs, calls = section.batch // section.minibatches, section.iterations * section.minibatches
    sampled = 2 * section.batch // section.minibatches
    packed = packed_parts(config, pairs, length, config.dpo.micro_batch_tokens, pairs=True, whole=sorts_the_batch(config.dpo))
    rows, parts = packed
    return [
        generate(config, "online_dpo", sampled, section.max_new_tokens, prompt, calls, stays),
        Task("online_dpo", "score", ("reference",), (), stays, rows, length, calls * parts),
        packed_update("online_dpo", ("policy",), stays, packed, length, calls * section.epochs),
    ]


def _reward_roles(config: Config) -> tuple[str, ...]:
    return ("preference model",) if any(record.learnt for record in reward_records(config.reward.source)) else ()


def best_of_n(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section = config.best_of_n
    calls = calls_for(section.prompts * section.n, section.batch)
    length = prompt_length(config, section.max_new_tokens, prompt) + section.max_new_tokens
    steps = calls_for(section.prompts * section.epochs, section.batch_rows)
    return [
        generate(config, "best_of_n", section.batch, section.max_new_tokens, prompt, calls, ("preference model",)),
        Task("best_of_n", "score", ("preference model",), (), ("policy", "preference model"), Rows(section.batch, length), 0,
             calls),
        lm_update("best_of_n", section.batch_rows, section.row_length, section.micro_batches, steps),
    ]


def ppo(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section, estimator = config.ppo, ADVANTAGES.get(config.ppo.advantages, "config.ppo.advantages")
    reward, new = _reward_roles(config), section.max_new_tokens
    critic = ("critic",) if estimator.needs_critic and section.critic == "separate" else ()
    stays = ("policy", *critic, "reference", *reward)
    length = prompt_length(config, new, prompt) + new
    part, parts = packed_parts(config, section.batch, length, section.micro_batch_tokens)
    rounds = 2 if estimator.needs_greedy else 1
    found = [generate(config, "ppo", section.batch, new, prompt, section.iterations * rounds, stays)]
    if reward:
        found.append(Task("ppo", "reward", reward, (), stays, part, 0, section.iterations * parts * rounds))
    recomputes = section.sampler_correction != "none" or estimator.needs_trainer_logprobs
    scored = ("reference", *(("policy",) if recomputes else ()), *(() if values_in_update(section) else critic))
    found.append(Task("ppo", "score", scored, (), stays, part, new, section.iterations * parts))
    packed = packed_parts(config, section.batch // section.minibatches, length, section.micro_batch_tokens)
    found.append(packed_update("ppo", ("policy", *critic), stays, packed, new, section.iterations,
                               section.epochs * section.minibatches, unit=1))
    return found


def evaluate(config: Config, prompt: int | None, examples: int | None) -> list[Task]:
    section = config.evaluate
    models = _models(config)
    answering = generate(config, "evaluate", section.batch, section.max_new_tokens, prompt,
                         models * calls_for(section.prompts, section.batch), ())
    others = judges.roles(config, "evaluate")
    asked = 2 * contests(config) * min(section.win_rate_prompts, section.prompts)
    return [answering, *(_verdicts(config, "evaluate", section.batch, asked, others, others, prompt) if asked else ())]


def contests(config: Config) -> int:
    """The number of pairs of models that stage evaluate compares."""
    return _models(config) * (_models(config) - 1) // 2


def _models(config: Config) -> int:
    """The number of models that stage evaluate measures."""
    policies = sum(record.makes_policy for record in stages_in_order(config.stages))
    return 1 + policies + len(rounds.later_policies(config))
