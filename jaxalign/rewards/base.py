"""Rewards: what RL asks for the scores of a batch of responses.

`Reward` is the protocol. `BaseReward` answers its optional parts with None, so a reward needs only a name and `score`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxalign.config import Config
from jaxalign.data.chat import styles
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.model import Model
from jaxalign.parallel.rows import fetch
from jaxalign.records import Prompt, Rollout
from jaxalign.rewards.scorer import Scorer
from jaxalign.rollout.responses import Response
from jaxalign.training.offload import FrozenRole

Listener = Callable[[Sequence[tuple[int, Response]]], None]
"""Receives responses as they end, each once: (row in the batch, response)."""


@dataclasses.dataclass(frozen=True)
class RewardBatch:
    """Responses to score.

    Texts and ids are fetched and decoded on first use. With several processes, all of them must use these, or none.

    Attributes:
      rollout: prompts and responses as arrays on the devices. It may have more rows than there are prompts; rows past the last
        prompt are padding.
      prompts: the prompt of each row.
      first_row: the global number of row 0, from which rewards that draw random numbers derive them.
      tokenizer: decodes the rollout's token ids.
    """

    rollout: Rollout
    prompts: Sequence[Prompt]
    first_row: int
    tokenizer: Tokenizer

    @functools.cached_property
    def host(self) -> Rollout:
        """The rollout as numpy arrays, without padding rows."""
        return fetch(self.rollout).part(0, len(self.prompts))

    @functools.cached_property
    def responses(self) -> list[str]:
        """The text of each response, without the stop token."""
        return styles.response_texts(self.tokenizer, self.host)

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """The token ids of each response, with the stop token if there is one."""
        host, ends = self.host, self.host.prompt_length + self.host.response_length
        return [row[begin:end].tolist() for row, begin, end in zip(host.tokens, host.prompt_length, ends, strict=True)]

    @property
    def ended(self) -> list[bool]:
        """Whether each response ended with a stop token."""
        return self.host.ended.tolist()


class Scored(NamedTuple):
    """The scores of a batch.

    Attributes:
      scores: float32 [B], one score a response, or [B, N], one a response token (zero past the end).
      kept: bool [B], the rows that have a score; None: all.
      parts: the scores of each part of a sum, by name, for the metrics.
    """

    scores: Any
    kept: Any = None
    parts: dict[str, Any] = {}  # noqa: RUF012 (never written to)


class FusedReward(NamedTuple):
    """A reward that is computed inside the jitted scoring program: its scorer, static for jit, and the scorer's weights."""

    scorer: Scorer
    role: FrozenRole


class Reward(Protocol):
    """Scores responses. `name` is used in metrics and error messages."""

    name: str

    def score(self, batch: RewardBatch) -> Scored:
        """The scores of the batch. All processes call it, in the same order."""

    def fused(self) -> FusedReward | None:
        """The same scores as a part of the jitted scoring program, which then replaces `score`; None if there is none."""

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """Called before responses to `prompts` are sampled; a listener receives them as they end. None: not interested."""


class BaseReward:
    """A reward that is not fused and does not listen. Subclasses define `score`.

    Attributes:
      name: see `Reward`.
      is_checked: whether `score` returns finite scores of the right shape by construction. `checked.as_reward` wraps other
        rewards in a `CheckedReward`.
    """

    is_checked = False

    def __init__(self, name: str):
        self.name = name

    def score(self, batch: RewardBatch) -> Scored:
        """See `Reward.score`."""
        raise NotImplementedError(f"reward {self.name!r} does not define score")

    def fused(self) -> FusedReward | None:
        """None."""
        return None

    def listen(self, prompts: Sequence[Prompt]) -> Listener | None:
        """None."""
        return None


@dataclasses.dataclass(frozen=True)
class RewardInputs:
    """What a reward source makes a reward from.

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
    """The columns passed to a reward function beside prompts and responses, one entry a row: "prompt_id", "source" and those of
    the prompts, which all have the same columns."""
    own = {name: [prompt.columns[name] for prompt in prompts] for name in prompts[0].columns}
    return {"prompt_id": [p.id for p in prompts], "source": [p.source for p in prompts]} | own
