"""What a run computes: every kind of jitted step of its stages, on how many rows of what length, and how often."""

from __future__ import annotations

import dataclasses
import math

from jaxalign.config import ADVANTAGES_WITH_CRITIC, POLICY_STAGES, STAGES, Config
from jaxalign.planner.memory import Rows
from jaxalign.registry.data_sources import data_source
from jaxalign.rl.state import values_in_update
from jaxalign.training.direct_step import sorts_the_batch
from jaxalign.training.packed import pair_rows, part_rows

UNPLANNED = ("reward_distill", "report")
"""Stages that no task is made for."""
LEARNT = ("preference", "distilled")


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of step.

    phase: "generate", "score" or "update". runs: the roles whose models compute; trains: those of them that learn;
    stays: the roles whose weights lie on the devices meanwhile, all of `runs` among them.
    rows: of one call; for an update those of one optimizer step, in `micro` parts, of which a call makes `steps`.
    counted: positions of a row that the LM head sees, 0 where it is not used.
    calls: in the whole run; None where that follows from data that is not at hand.
    """

    stage: str
    phase: str
    runs: tuple[str, ...]
    trains: tuple[str, ...]
    stays: tuple[str, ...]
    rows: Rows
    counted: int
    calls: int | None
    micro: int = 1
    steps: int = 1

    @property
    def name(self) -> str:
        return f"{self.stage} {self.phase}"

    @property
    def tokens(self) -> int:
        """Tokens of one call: new ones where it generates, else all that it reads."""
        return self.rows.rows * (self.rows.new or self.rows.length) * self.steps


def tasks(config: Config, prompt: int | None = None, examples: int | None = None) -> list[Task]:
    """The tasks of config.stages, in their order.

    prompt: tokens of the longest prompt; None: what model.max_length leaves beside the new ones. examples: rows or pairs of
    the data file, where the number of steps follows from it.
    """
    found = []
    for stage in STAGES:
        if stage in config.stages and stage not in UNPLANNED:
            found += _TASKS[stage](config, prompt, examples)
    return found


def _prompt(config: Config, new: int, prompt: int | None) -> int:
    return prompt or config.model.max_length - new


def _generate(config: Config, stage: str, rows: int, new: int, prompt: int | None, calls: int | None, stays, role="policy"):
    lengths = Rows(rows, _prompt(config, new, prompt), new)
    return Task(stage, "generate", (role,), (), tuple(dict.fromkeys((role, *stays))), lengths, 1, calls)


def _times(total: float | None, batch: int) -> int | None:
    return None if total is None else math.ceil(total / batch)


def _lm(config: Config, stage: str, section, calls: int | None) -> Task:
    return Task(stage, "update", ("policy",), ("policy",), ("policy",), Rows(section.batch_rows, section.row_length),
                section.row_length - 1, calls, section.micro_batches or 1)


def _pretrain(config: Config, prompt, examples):
    return [_lm(config, "pretrain", config.pretrain, config.pretrain.steps)]


def _sft(config: Config, prompt, examples):
    return [_lm(config, "sft", config.sft, _times(None if examples is None else examples * config.sft.epochs,
                                                 config.sft.batch_rows))]


def _revise(config: Config, prompt, examples):
    section = config.revise
    asked = section.red_team_prompts * (1 + 2 * section.rounds) + section.helpful_prompts
    return [_generate(config, "revise", section.batch, section.max_new_tokens, prompt, _times(asked, section.batch), ())]


def _compare(config: Config, prompt, examples):
    section, feedback = config.compare, config.feedback
    found = [_generate(config, "compare", section.batch, section.max_new_tokens, prompt,
                       _times(2 * section.prompts, section.batch), ("labeller",))]
    asked = 2 * section.prompts * feedback.principles_per_comparison  # Each pair is shown in both orders.
    if feedback.reasoning:
        found.append(_generate(config, "compare", section.batch, feedback.max_reasoning_tokens, prompt,
                               _times(asked, section.batch), ("policy",), "labeller"))
    found.append(Task("compare", "score", ("labeller",), (), ("policy", "labeller"),
                      Rows(section.batch, config.model.max_length), 1, _times(asked, section.batch)))
    return found


def _pairs(config: Config, examples: int | None) -> int | None:
    return config.compare.prompts if data_source(config).feedback else examples


def _preference(config: Config, prompt, examples):
    section, pairs = config.preference, _pairs(config, examples)
    learnt = None if pairs is None else pairs * (1 - section.held_out_share) * section.epochs * section.members
    role = ("preference model",)
    return [_update(config, "preference", role, role, 0, None, _times(learnt, section.batch))]


def _dpo(config: Config, prompt, examples):
    section, pairs = config.dpo, _pairs(config, examples)
    rows, parts = micro_batches(config, "dpo")
    reference = section.reference == "start"
    steps = _times(None if pairs is None else pairs * section.epochs, section.batch)
    stays = ("policy", "reference") if reference else ("policy",)
    score = [Task("dpo", "score", ("reference",), (), stays, rows, section.max_length,
                  None if pairs is None else parts * _times(pairs, section.batch))]
    update = _update(config, "dpo", ("policy",), stays, section.max_length, None, steps)
    return [*(score if reference else []), update]


def _online_dpo(config: Config, prompt, examples):
    section = config.online_dpo
    stays = ("policy", "reference", *_reward_roles(config))
    length = _prompt(config, section.max_new_tokens, prompt) + section.max_new_tokens
    part, calls = 2 * section.batch // section.minibatches, section.iterations * section.minibatches
    rows, parts = micro_batches(config, "online_dpo", prompt)
    return [
        _generate(config, "online_dpo", part, section.max_new_tokens, prompt, calls, stays),
        Task("online_dpo", "score", ("reference",), (), stays, rows, length, calls * parts),
        _update(config, "online_dpo", ("policy",), stays, length, prompt, calls * section.epochs),
    ]  # fmt: skip


def _reward_roles(config: Config) -> tuple[str, ...]:
    return () if set(LEARNT).isdisjoint(config.reward.source.split("+")) else ("preference model",)


def _best_of_n(config: Config, prompt, examples):
    section = config.best_of_n
    calls = _times(section.prompts * section.n, section.batch)
    length = _prompt(config, section.max_new_tokens, prompt) + section.max_new_tokens
    return [
        _generate(config, "best_of_n", section.batch, section.max_new_tokens, prompt, calls, ("preference model",)),
        Task("best_of_n", "score", ("preference model",), (), ("policy", "preference model"), Rows(section.batch, length), 0,
             calls),
        _lm(config, "best_of_n", section, _times(section.prompts * section.epochs, section.batch_rows)),
    ]  # fmt: skip


def micro_batches(config: Config, stage: str, prompt: int | None = None) -> tuple[Rows, int]:
    """(a micro-batch of packed sequences of "ppo", "preference", "dpo" or "online_dpo", how many an update has where all are as
    long as they may be)."""
    if stage == "ppo":
        length, sequences = _ppo_length(config, prompt), config.ppo.batch // config.ppo.minibatches
        return _parts(config, sequences, length, config.ppo.micro_batch_tokens)
    if stage == "preference":
        section = config.preference
        return _parts(config, section.batch, section.max_length, section.micro_batch_tokens, pairs=True)
    pairs, length, whole = config.dpo.batch, config.dpo.max_length, sorts_the_batch(config.dpo)
    if stage == "online_dpo":
        section = config.online_dpo
        pairs = section.batch // section.minibatches
        length = _prompt(config, section.max_new_tokens, prompt) + section.max_new_tokens
    return _parts(config, pairs, length, config.dpo.micro_batch_tokens, pairs=True, whole=whole)


def _ppo_length(config: Config, prompt: int | None) -> int:
    return _prompt(config, config.ppo.max_new_tokens, prompt) + config.ppo.max_new_tokens


def _parts(config: Config, count: int, length: int, tokens: int, pairs: bool = False, whole: bool = False):
    """(Rows of a part, most parts) of so many sequences or pairs."""
    mesh = config.mesh
    split = mesh.data * mesh.fsdp, mesh.data * mesh.fsdp * (mesh.pipeline_micro_batches or mesh.pipeline)
    rows, parts = pair_rows(count, length, tokens, *split, whole) if pairs else part_rows(count, length, tokens, *split)
    return Rows(rows, length), parts


def _update(config: Config, stage: str, trained: tuple[str, ...], stays, counted: int, prompt, calls, steps=1) -> Task:
    """An update over packed micro-batches, all of them."""
    part, parts = micro_batches(config, stage, prompt)
    rows = Rows(part.rows * parts, part.length)
    return Task(stage, "update", trained, trained, stays, rows, counted, calls, parts, steps)


def _ppo(config: Config, prompt, examples):
    section = config.ppo
    reward, new = _reward_roles(config), section.max_new_tokens
    critic = ("critic",) if section.advantages in ADVANTAGES_WITH_CRITIC and section.critic == "separate" else ()
    stays = ("policy", *critic, "reference", *reward)
    length = _ppo_length(config, prompt)
    part, parts = _parts(config, section.batch, length, section.micro_batch_tokens)
    rounds = 2 if section.advantages == "remax" else 1
    found = [_generate(config, "ppo", section.batch, new, prompt, section.iterations * rounds, stays)]
    if reward:
        found.append(Task("ppo", "reward", reward, (), stays, part, 0, section.iterations * parts * rounds))
    recomputes = section.sampler_correction != "none" or section.advantages == "vtrace"
    scored = ("reference", *(("policy",) if recomputes else ()), *(() if values_in_update(section) else critic))
    found.append(Task("ppo", "score", scored, (), stays, part, new, section.iterations * parts))
    trained = ("policy", *critic)
    found.append(_update(config, "ppo", trained, stays, new, prompt, section.iterations, section.epochs * section.minibatches))
    return found


def _evaluate(config: Config, prompt, examples):
    section = config.evaluate
    models = 1 + sum(stage in POLICY_STAGES for stage in config.stages)
    return [_generate(config, "evaluate", section.batch, section.max_new_tokens, prompt,
                      models * _times(section.prompts, section.batch), ())]


_TASKS = {
    "pretrain": _pretrain, "revise": _revise, "sft": _sft, "compare": _compare, "preference": _preference, "dpo": _dpo,
    "online_dpo": _online_dpo, "best_of_n": _best_of_n, "ppo": _ppo, "evaluate": _evaluate,
}  # fmt: skip
