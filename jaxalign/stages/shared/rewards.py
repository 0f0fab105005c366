"""What scores the responses of RL: the run's preference model or its student, a model from outside, a callable, a verifier, a
rating, or a sum."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxalign.algorithms.labels import direct_reward
from jaxalign.algorithms.rewards import combine_scores, length_penalty, normalise_scores
from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.rater import Rater
from jaxalign.models.model import Model
from jaxalign.parallel import hosts
from jaxalign.parallel.rows import fetch
from jaxalign.records import Prompt, Rollout
from jaxalign.rewards.callables import call_reward, load_callable
from jaxalign.rewards.early import Answered, EarlyScores
from jaxalign.rewards.outside import load_reward_model
from jaxalign.rewards.scorer import Scorer, rollout_scores
from jaxalign.rewards.verifiers import VERIFIERS
from jaxalign.rollout.engine import Heard
from jaxalign.stages.shared import common
from jaxalign.stages.shared.base import StageContext
from jaxalign.stages.shared.scorers import load_scorer
from jaxalign.training.offload import FrozenRole

Columns = dict[str, list]


class Scored(NamedTuple):
    """scores float32 [B]; kept bool [B], the rows that have one, or None for all; parts: of a sum, each part's scores [B]."""

    scores: Any
    kept: Any = None
    parts: dict[str, Any] = {}  # noqa: RUF012 (never written to)


Reward = Callable[[Rollout, Sequence[int], int], Scored]
"""(rollout, the prompt's number of each row, the first row's global number) -> Scored."""


def listener(reward: Reward, index: Sequence[int]) -> Heard | None:
    """What the rows of a rollout, of prompts of these numbers, are to be handed to as they end; None: nobody asks for them.
    The reward is then called with that rollout."""
    parts = reward.parts.values() if isinstance(reward, SummedReward) else (reward,)
    heard = [part.listen(index) for part in parts if isinstance(part, FunctionReward)]
    heard = [one for one in heard if one is not None]
    if not heard:
        return None

    def all_hear(ended) -> None:
        for one in heard:
            one(ended)

    return all_hear


def reward_sources(config: Config) -> tuple[str, ...]:
    """The parts of the reward, in the order in which they are written."""
    return tuple(config.reward.source.split("+"))


def callable_files(config: Config) -> dict[Path, str]:
    """The file of the user's callable, where it is in one."""
    place = config.reward.callable.rpartition(":")[0]
    used = "callable" in reward_sources(config) and place.endswith(".py")
    return {Path(place).expanduser(): "reward.callable"} if used else {}


def is_learnt(config: Config) -> bool:
    """Whether the preference model, or its student, is a part of the reward."""
    return not {"preference", "distilled"}.isdisjoint(reward_sources(config))


def make_reward(context: StageContext, policy: Model, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Reward:
    """The reward of config.reward: its one part, or the weighted sum of several, less the cost of length."""
    config = context.config
    makers = {
        "preference": lambda: _learnt(context, "preference", policy),
        "distilled": lambda: _learnt(context, "distilled", policy),
        "model": lambda: ModelReward(context, prompts, tokenizer),
        "callable": lambda: FunctionReward(
            config, config.reward.callable, load_callable(config.reward.callable), prompts, tokenizer
        ),
        "verifier": lambda: FunctionReward(config, config.reward.verifier, verifier(config), prompts, tokenizer),
        "ai_feedback": lambda: _ai_feedback(context, policy, prompts, tokenizer),
    }
    names = reward_sources(config)
    parts = {name: makers[name]() for name in names}
    weights = config.reward.weights or (1.0,) * len(names)
    if weights == (1.0,) and not config.reward.length_coef:
        return parts[names[0]]
    return SummedReward(parts, weights, config.reward.length_coef, config.reward.length_free)


def verifier(config: Config) -> Callable[..., Sequence[float]]:
    """The function that config.reward.verifier names."""
    return VERIFIERS[config.reward.verifier]


def _learnt(context: StageContext, source: str, policy: Model) -> Reward:
    scorer, params = load_scorer(context, source, policy, context.config.ppo.score_clip)
    return LearntReward(scorer, common.frozen_role(context, policy, params))


@dataclasses.dataclass(frozen=True)
class LearntReward:
    """Normalised scores of a reward model that reads the policy's tokens."""

    scorer: Scorer
    role: FrozenRole

    def __call__(self, rollout: Rollout, *_) -> Scored:
        with self.role.on_device() as params:
            return Scored(rollout_scores(self.scorer, params, rollout))


def _ai_feedback(context: StageContext, policy: Model, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Reward:
    judge = common.speaker(context, policy, common.base_params(context, policy), context.config.ppo.batch)
    rating = common.rater(context, judge, context.config.reward.principles)
    role = common.frozen_role(context, policy, judge.params)
    return RatedReward(context.config, rating, prompts, tokenizer, common.stage_key(context.config, "ppo", "ratings"), role)


class SummedReward:
    """weight * score, added up, less `length_coef` for every token of the response beyond the first `length_free`.

    A row that one part has no score for has none.
    """

    def __init__(self, parts: dict[str, Reward], weights: Sequence[float], length_coef: float, length_free: int):
        self.parts, self.weights, self.length = parts, np.asarray(weights, np.float32), (length_coef, length_free)

    def __call__(self, rollout: Rollout, index: Sequence[int], first_row: int) -> Scored:
        scored = {name: part(rollout, index, first_row) for name, part in self.parts.items()}
        scores = jnp.stack([jnp.asarray(s.scores, jnp.float32) for s in scored.values()])
        everything = jnp.ones(scores.shape[1], bool)
        present = jnp.stack([everything if s.kept is None else jnp.asarray(s.kept) for s in scored.values()])
        total, kept = combine_scores(scores, self.weights, present)
        shown = {name: part.scores for name, part in scored.items()} if len(scored) > 1 else {}
        if self.length[0]:
            cost = length_penalty(rollout.response_length, *self.length)
            total, shown = total + cost, shown | {"length": cost}
        return Scored(total, kept, shown)


class _Guarded:
    """Counts the rows that have no score: warns once, and stops the run above config.reward.max_dropped_share of a batch."""

    def __init__(self, config: Config, name: str, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        self.config, self.name, self.prompts, self.tokenizer = config.reward, name, prompts, tokenizer
        self.warned = False

    def _asked(self, rollout: Rollout, index: Sequence[int]) -> tuple[list[Prompt], list[str]]:
        asked = [self.prompts[i] for i in index]
        return asked, styles.response_texts(self.tokenizer, fetch(rollout))[: len(asked)]

    def _tell(self, dropped: int, rows: int, why: str) -> None:
        if not dropped:
            return
        told = f"{self.name} gave no score for {dropped} of {rows} responses ({why})"
        if dropped > self.config.max_dropped_share * rows:
            raise UserError(f"{told}, more than config.reward.max_dropped_share ({self.config.max_dropped_share}) allows; "
                            "mend it and run again: the run goes on from its last checkpoint")
        if not self.warned:
            logging.getLogger("jaxalign").warning("ppo: %s; they are left out, and the metric 'kept' counts the others", told)
            self.warned = True


class FunctionReward(_Guarded):
    """A function `(prompts, responses, **columns) -> scores`, the user's or a verifier, called through `call_reward`.

    Of several processes the first one calls it, for all rows, since it may reach out of the run.
    prompts are dialogues as lists of {"role", "content"}; columns are "prompt_id", "source" and those of the prompts.
    """

    def __init__(self, config: Config, name: str, fn: Callable, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        super().__init__(config, name, prompts, tokenizer)
        self.fn = fn
        self.early: EarlyScores | None = None  # Of the next rollout; on the first process alone.
        self.listens = False  # On all processes, whether the first one has such.

    def listen(self, index: Sequence[int]) -> Heard | None:
        """Where config.reward.while_sampling: what is to be told of the rows of the next rollout as they end."""
        self.listens = self.config.while_sampling
        if not self.listens or hosts.index() > 0:
            return None

        def ask(rows: Sequence[int], ids: Sequence[Sequence[int]]) -> Answered:
            return self._ask([self.prompts[index[row]] for row in rows], [self.tokenizer.decode(own) for own in ids])

        if self.early is not None:  # A rollout that was given up.
            self.early.close()
        self.early = EarlyScores(ask)
        return self.early.heard

    def _ask(self, asked: Sequence[Prompt], texts: Sequence[str]) -> Answered:
        dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in asked]
        config = self.config
        return call_reward(self.fn, dialogues, texts, columns_of(asked), config.retries, config.timeout_s, config.backoff_s)

    def __call__(self, rollout: Rollout, index: Sequence[int], first_row: int) -> Scored:
        early, self.early = self.early, None
        asked = None if self.listens else self._asked(rollout, index)  # Fetches: all processes do, or none.
        self.listens = False

        def found() -> list:
            if asked is None:
                scores, kept, why = early.result(len(index))
            else:
                scores, kept, report = self._ask(*asked)
                why = report.first_error
            return [scores.tolist(), kept.tolist(), why]

        scores, kept, why = hosts.once(found)
        self._tell(len(kept) - sum(kept), len(kept), why)
        return Scored(np.asarray(scores, np.float32), np.asarray(kept, bool))


class ModelReward(_Guarded):
    """Normalised scores of config.reward.model: responses become text, and are encoded anew with its own tokenizer."""

    def __init__(self, context: StageContext, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        config = context.config
        super().__init__(config, "reward.model", prompts, tokenizer)
        model = load_reward_model(config.reward, common.sharding(config), config.ppo.score_clip)
        self.model, self.role = model._replace(params=None), FrozenRole(model.params, "frozen" in config.mesh.offload)

    def __call__(self, rollout: Rollout, index: Sequence[int], first_row: int) -> Scored:
        asked, texts = self._asked(rollout, index)
        with self.role.on_device() as params:
            raw = self.model._replace(params=params).score([prompt.messages for prompt in asked], texts)
        scored, scorer = np.isfinite(raw), self.model.scorer
        self._tell(int(np.sum(~scored)), len(scored), "the last question and the answer are too long for it, its chat template "
                   "refuses the dialogue, or its score is not finite")
        return Scored(normalise_scores(np.where(scored, raw, 0), scorer.shift, scorer.scale, scorer.clip), scored)


class RatedReward(_Guarded):
    """The feedback model's expected rating of each response, brought from 1..10 to -1..1."""

    def __init__(
        self, config: Config, rater: Rater, prompts: Sequence[Prompt], tokenizer: Tokenizer, key: jax.Array, role: FrozenRole
    ):
        super().__init__(config, "ai_feedback", prompts, tokenizer)
        self.rater, self.key, self.role = rater, key, role

    def __call__(self, rollout: Rollout, index: Sequence[int], first_row: int) -> Scored:
        asked, texts = self._asked(rollout, index)
        with self.role.on_device() as params:
            speaking = dataclasses.replace(self.rater.speaker, params=params)
            ratings = dataclasses.replace(self.rater, speaker=speaking).rate(asked, texts, self.key, first_row)
        rated = np.isfinite(ratings)
        self._tell(int(np.sum(~rated)), len(rated), "its reasoning did not end, or the dialogue left no room for it")
        return Scored(np.asarray(direct_reward(np.where(rated, ratings, 5.5))), rated)


def columns_of(prompts: Sequence[Prompt]) -> Columns:
    """What a callable gets beside prompts and responses, one entry a row."""
    own = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
    return {"prompt_id": [p.id for p in prompts], "source": [p.source for p in prompts]} | own
