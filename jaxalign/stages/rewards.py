"""What scores the responses of RL: the preference model or its student, or a callable of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxalign.config import Config
from jaxalign.data.reward_callables import call_reward, load_callable
from jaxalign.data.tokenizer import Tokenizer
from jaxalign.errors import UserError
from jaxalign.records import Prompt, Rollout
from jaxalign.stages import sources
from jaxalign.training.scorer import Scorer, rollout_scores

Reward = Callable[[Rollout, Sequence[int]], tuple[Any, Any]]
"""(rollout, the prompt's number of each row) -> scores float32 [B], and bool [B] of the rows that have one, or None for all."""


def callable_files(config: Config) -> dict[Path, str]:
    """The file of the user's callable, where it is in one."""
    place = config.reward.callable.rpartition(":")[0]
    used = config.reward.source == "callable" and place.endswith(".py")
    return {Path(place).expanduser(): "reward.callable"} if used else {}


def learnt_reward(scorer: Scorer, params) -> Reward:
    """Normalised scores of a reward model."""
    return lambda rollout, _: (rollout_scores(scorer, params, rollout), None)


class CallableReward:
    """The user's `(prompts, responses, **columns) -> scores`, behind the guard of `call_reward`.

    prompts are dialogues as lists of {"role", "content"}; columns are "prompt_id" and "source". Rows without a score are
    counted and left out of the step; when their share of a batch is above config.reward.max_dropped_share the run stops.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt], tokenizer: Tokenizer):
        self.config, self.prompts, self.tokenizer = config.reward, prompts, tokenizer
        self.fn = load_callable(config.reward.callable)
        self.warned = False

    def __call__(self, rollout: Rollout, index: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        asked = [self.prompts[i] for i in index]
        dialogues = [[{"role": m.role, "content": m.content} for m in prompt.messages] for prompt in asked]
        columns = {"prompt_id": [prompt.id for prompt in asked], "source": [prompt.source for prompt in asked]}
        texts = sources.response_texts(self.tokenizer, jax.device_get(rollout))[: len(asked)]
        config = self.config
        scores, kept, report = call_reward(
            self.fn, dialogues, texts, columns, config.retries, config.timeout_s, config.backoff_s
        )
        if report.dropped:
            self._tell(report)
        return scores, kept

    def _tell(self, report) -> None:
        told = f"{self.config.callable} gave no score for {report.dropped} of {report.rows} responses ({report.first_error})"
        if report.dropped > self.config.max_dropped_share * report.rows:
            raise UserError(f"{told}, more than config.reward.max_dropped_share ({self.config.max_dropped_share}) allows; "
                            "mend the callable and run again: the run goes on from its last checkpoint")
        if not self.warned:
            logging.getLogger("jaxalign").warning("ppo: %s; they are left out, and the metric 'kept' counts the others", told)
            self.warned = True
