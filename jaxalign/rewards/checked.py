"""Converts a user's reward to a `Reward` and checks its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxalign.config import Config, RewardConfig
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch
from jaxalign.records import Prompt
from jaxalign.registry.core import load_object
from jaxalign.registry.custom import custom_code, new_instance, wrong_result
from jaxalign.registry.rewards import REWARDS, RewardSource
from jaxalign.rewards.base import DroppedRows, FusedReward, Listener, Reward, RewardBatch, RewardInputs, Scored
from jaxalign.rewards.functions import FunctionReward
from jaxalign.rewards.verifiers import VERIFIERS


def as_reward(
    reward: Any, tokenizer: Tokenizer, settings: RewardConfig | None = None, name: str | None = None,
    policy: Model | None = None,
) -> Reward:
    """A `Reward` from any form that a user may give.

    Args:
      reward: a `Reward`; an object with a method `as_reward()`, such as a trained `RewardModel`; any object or class with a
        method `score(batch)`; a function `(prompts, responses, **columns) -> scores`; a `RewardSource` or the name of a
        registered one; the name of a verifier; or "package.module:name" or "FILE.py:name" for one of these.
      tokenizer: the policy's tokenizer.
      settings: how to call a function and how many rows a reward may drop, in a stage of a run; None for the defaults of
        `config.reward`, outside of a run.
      name: the reward's name in metrics; None for its own name.
      policy: the policy's architecture, for a `RewardSource`.

    Raises:
      UserError: `reward` has none of these forms, cannot be imported, or is a `RewardSource` that needs a run.
    """
    in_run, settings, given = settings is not None, settings or RewardConfig(), reward
    if isinstance(reward, str):
        known = VERIFIERS.get(reward) or (REWARDS.get(reward) if ":" not in reward and reward in REWARDS else None)
        if known is None and ":" not in reward:
            names = (*VERIFIERS, *(name for name in REWARDS.names() if name not in REWARDS.builtin))
            raise UserError(f"reward is {reward!r}; one of {', '.join(names)}, or 'package.module:name' or 'FILE.py:name' of "
                            "your own, is expected")
        reward = known or load_object(reward, "reward")
    if isinstance(reward, RewardSource):
        name = name or reward.name
        reward = _from_source(reward, tokenizer, policy)
    if isinstance(reward, type):
        reward = new_instance(reward, f"the reward {reward.__name__}", "give an instance")
    if hasattr(reward, "as_reward"):
        reward = reward.as_reward()
    if hasattr(reward, "score"):
        name = str(name or getattr(reward, "name", None) or type(reward).__name__)
        is_checked = getattr(reward, "is_checked", False)
        return reward if is_checked else CheckedReward(reward, name, settings.max_dropped_share, in_run)
    if not callable(reward):
        raise UserError(f"the reward is {given!r} of type {type(given).__name__}; a function (prompts, responses, **columns) "
                        "-> scores, an object with a method score(batch), or 'module:name' of one is expected")
    name = name or getattr(reward, "__name__", type(reward).__name__)
    return FunctionReward(name, reward, settings, tokenizer, in_run=in_run)


def _from_source(source: RewardSource, tokenizer: Tokenizer, policy: Model | None) -> Any:
    """The reward that a source makes outside of a run. Raises UserError if the source reads a run."""
    needs_run = source.stages or source.reads_base or source.asks_judge or source.needs or source.files
    if needs_run or source.name in REWARDS.builtin:
        raise UserError(f"the reward is the source {source.name!r}, which reads the config or the stages of a run; set "
                        "config.reward.source of a run to it, or give a trained RewardModel, a function or an object here")
    with custom_code(f"reward source {source.name!r}"):
        return source.load("make")(RewardInputs(Config(), tokenizer, policy, None))


class CheckedReward(Reward):
    """A user's reward object. Rows with non-finite scores are dropped; any other fault raises UserError.

    Args:
      reward: an object with `score(batch)`, which returns a `Scored` or an array or list of scores; `fused` and `listen` are
        optional.
      name: the reward's name in metrics and messages.
      max_dropped_share, in_run: see `DroppedRows`.
    """

    is_checked = True

    def __init__(self, reward: Any, name: str, max_dropped_share: float, in_run: bool):
        self.name, self.reward = name, reward
        self._dropped = DroppedRows(f"reward {name!r}", max_dropped_share, in_run)

    def fused(self) -> FusedReward | None:
        """The reward's own, if it has one."""
        return self.reward.fused() if hasattr(self.reward, "fused") else None

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """The reward's own, if it has one."""
        return self.reward.listen(prompts) if hasattr(self.reward, "listen") else None

    def score(self, batch: RewardBatch) -> Scored:
        """Finite scores [B] or [B, N], with a mask of the rows that have them."""
        with custom_code(f"reward {self.name!r}", self.reward.score):
            result = self.reward.score(batch)
        scored = result if isinstance(result, Scored) else Scored(result)
        rows, tokens = len(batch.prompts), batch.rollout.logprobs.shape[1]
        scores, kept = self._arrays(scored, rows, tokens)
        if scores.ndim == 2:  # Entries past the end of a response are meaningless.
            length = np.asarray(fetch(batch.rollout.response_length))[:rows, None]
            scores = np.where(np.arange(tokens)[None, :] < length, scores, 0)
        finite = np.isfinite(scores).reshape(rows, -1).all(axis=1)
        kept = finite & kept
        self._dropped.check(rows - int(kept.sum()), rows, "a score that is not finite, or a row it does not keep")
        return Scored(np.where(kept.reshape(-1, *(1,) * (scores.ndim - 1)), scores, 0), kept, scored.parts)

    def _arrays(self, scored: Scored, rows: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32 [B] or [B, N], kept bool [B]) as numpy arrays of the right shape."""
        name = f"reward {self.name!r}"
        try:
            scores = np.asarray(fetch(scored.scores)).astype(np.float32)
        except (TypeError, ValueError) as error:
            raise wrong_result(name, f"{type(scored.scores).__name__} with entries that are not numbers",
                               f"a list of {rows} scores") from error
        if scores.shape not in ((rows,), (rows, tokens)):
            raise wrong_result(name, f"scores of shape {scores.shape} for {rows} responses",
                               f"({rows},), one for each response, or ({rows}, {tokens}), one for each token,")
        kept = np.ones(rows, bool) if scored.kept is None else np.asarray(fetch(scored.kept))
        if kept.shape != (rows,):
            raise wrong_result(name, f"kept of shape {kept.shape}", f"({rows},)")
        return scores, kept.astype(bool)
