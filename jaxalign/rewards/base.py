"""The interface through which RL scores a batch of responses.

A subclass of `Reward` needs only a name and `score`. A user's reward need not be a subclass: `checked.as_reward` converts it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch
from jaxalign.records import Prompt, Rollout
from jaxalign.rewards.scorer import Scorer
from jaxalign.rollout.responses import Response
from jaxalign.rollout.stops import before_stop
from jaxalign.steps.offload import FrozenRole

Listener = Callable[[Sequence[tuple[int, Response]]], None]
"""Receives each response once, when it ends, as (row in the batch, response)."""


@dataclasses.dataclass(frozen=True)
class RewardBatch:
    """Responses to score.

    Texts and ids are fetched and decoded on first use, so either all processes must use them or none.

    Attributes:
      rollout: prompts and responses as arrays on the devices. It may have more rows than there are prompts; rows past the last
        prompt are padding.
      prompts: the prompt of each row.
      first_row: the global number of row 0, from which rewards derive random numbers.
      tokenizer: decodes the rollout's token ids.
      stop: the stop texts that ended responses of the rollout.
    """

    rollout: Rollout
    prompts: Sequence[Prompt]
    first_row: int
    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()

    @functools.cached_property
    def host(self) -> Rollout:
        """The rollout as numpy arrays, without padding rows."""
        return fetch(self.rollout).part(0, len(self.prompts))

    @functools.cached_property
    def responses(self) -> list[str]:
        """The text of each response, excluding the stop token or the stop text."""
        texts = styles.response_texts(self.tokenizer, self.host)
        if not self.stop:
            return texts
        # The last token of a response that a stop text ended completes that text; the texts above lack it.
        whole = (self.tokenizer.decode(ids) if ended else text
                 for ids, ended, text in zip(self.ids, self.ended, texts, strict=True))
        return [before_stop(own, self.stop) if any(end in own for end in self.stop) else text
                for own, text in zip(whole, texts, strict=True)]

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """The token ids of each response, including the stop token or those that complete a stop text, if any."""
        host, ends = self.host, self.host.prompt_length + self.host.response_length
        return [row[begin:end].tolist() for row, begin, end in zip(host.tokens, host.prompt_length, ends, strict=True)]

    @property
    def ended(self) -> list[bool]:
        """Whether each response ended with a stop token or a stop text."""
        return self.host.ended.tolist()


class Scored(NamedTuple):
    """The scores of a batch.

    Attributes:
      scores: float32 [B], one score per response, or [B, N], one per response token (zero past the end).
      kept: bool [B], True for rows that have a score; None: all rows have one.
      parts: the scores of each part of a sum by name, for the metrics; NaN in rows without a score of this part.
    """

    scores: Any
    kept: Any = None
    parts: dict[str, Any] = {}  # noqa: RUF012 (never written to)


class FusedReward(NamedTuple):
    """A reward that is computed inside the jitted scoring program: its scorer, static for jit, and the scorer's weights."""

    scorer: Scorer
    role: FrozenRole


class Reward(abc.ABC):
    """Scores responses.

    Attributes:
      name: its name in metrics and error messages.
      is_checked: whether `score` returns finite scores of the right shape by construction. `checked.as_reward` wraps other
        rewards in a `CheckedReward`.
    """

    name: str
    is_checked = False

    @abc.abstractmethod
    def score(self, batch: RewardBatch) -> Scored:
        """The scores of the batch. All processes call this, in the same order."""

    def fused(self) -> FusedReward | None:
        """The reward as part of the jitted scoring program, which is then used instead of `score`; None if not supported."""
        return None

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """Called before responses to `prompts` are sampled. Returns a listener that receives them as they end, or None."""
        return None


@dataclasses.dataclass
class DroppedRows:
    """Warns once about responses without a score, and stops the run if too many in a batch have none.

    Attributes:
      name: the reward's name in messages.
      max_share: the largest share of a batch that may lack a score (`config.reward.max_dropped_share`).
      in_run: whether a stage of a run uses the reward, which messages then tell how to set the share and to run again.
    """

    name: str
    max_share: float
    in_run: bool = True
    _warned: bool = dataclasses.field(default=False, init=False)

    def check(self, dropped: int, rows: int, why: str | None, cause: BaseException | None = None) -> None:
        """Checks the counts of one batch. Raises UserError, from `cause`, if more than the allowed share was dropped."""
        if not dropped:
            return
        sentence = f"{self.name} gave no score for {dropped} of {rows} responses ({why})"
        if dropped > self.max_share * rows:
            if not self.in_run:
                raise UserError(f"{sentence}, more than the allowed share of {self.max_share}; fix the cause") from cause
            raise UserError(f"{sentence}, more than config.reward.max_dropped_share ({self.max_share}) allows; fix the cause "
                            "and run the same command again, or run it with a larger share; both resume the run") from cause
        if not self._warned:
            logging.getLogger("jaxalign").warning(
                "%s; these rows are left out, and the metric 'kept' counts the others", sentence
            )
            self._warned = True


@dataclasses.dataclass(frozen=True)
class RewardInputs:
    """The inputs from which a reward source constructs a reward.

    Attributes:
      config: the run's config.
      tokenizer: the policy's tokenizer.
      policy: the policy's architecture with its mesh.
      context: the `StageContext` of the stage that uses the reward, for sources that read other stages' output.
    """

    config: Config
    tokenizer: Tokenizer
    policy: Model
    context: Any


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list]:
    """The columns that a reward function receives besides prompts and responses, one entry per row: "prompt_id", "source" and
    the prompts' own columns, which are the same for all prompts."""
    own = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
    return {"prompt_id": [p.id for p in prompts], "source": [p.source for p in prompts]} | own
