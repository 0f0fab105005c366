"""Sets up sampling for a stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxalign.config import Config
from jaxalign.data.chat import encoding as chat
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.feedback.speaker import Counted, Speaker
from jaxalign.models.model import Model, Params
from jaxalign.records import Rollout
from jaxalign.rollout.engine import Engine, OnFinished
from jaxalign.rollout.sampler import Sampler, make_sampler, sample_rollout
from jaxalign.rollout.sampling import Sampling, section_sampling
from jaxalign.stages.shared import run_models
from jaxalign.stages.shared.base import StageContext


def speaker(context: StageContext, model: Model, params: Params, batch: int, counted: Counted | None = None) -> Speaker:
    """A model that answers prompts, `batch` rows at a time. It reports its work to `counted`."""
    engine = Engine(model, batch, context.config.model.max_length)
    return Speaker(engine, params, run_models.load_tokenizer(context), counted)


@dataclasses.dataclass(frozen=True)
class PolicySampler:
    """Samples rollouts of a policy with the sampler of `config.sampler`.

    Attributes:
      engine: defines the sizes of a batch; the local sampler samples with it.
      sampling: the sampling settings.
      sampler: the sampler, which has no unfinished rows between calls.
    """

    engine: Engine
    sampling: Sampling
    sampler: Sampler

    def update(self, params: Params, version: int) -> None:
        """Samples with `params` from now on. version: the number of updates applied to them."""
        self.sampler.update(params, version)

    def rollout(
        self, prompts: Sequence[Sequence[int]], key: jax.Array, rows: Sequence[int], on_finished: OnFinished | None = None
    ) -> Rollout:
        """`sample_rollout` with this sampler. `versions` is None, since all tokens are sampled with the same weights."""
        found = sample_rollout(self.sampler, self.engine.padding, prompts, key, rows, self.sampling, on_finished)
        return dataclasses.replace(found, versions=None)


def policy_sampler(config: Config, model: Model, batch: int, sampling: Sampling, bucket: int = 32) -> PolicySampler:
    """The sampler of `config.sampler`, for `batch` rows of `model` at a time. bucket: the engine's bucket."""
    engine = Engine(model, batch, config.model.max_length, bucket)
    return PolicySampler(engine, sampling, make_sampler(config.sampler, engine, "config.sampler"))


def sampler_files(config: Config) -> dict[Path, str]:
    """The file in `config.sampler`, if it has the form "FILE.py:name"."""
    place = config.sampler.rpartition(":")[0]
    return {Path(place).expanduser(): "sampler"} if place.endswith(".py") else {}


def sampling(section, tokenizer: Tokenizer, style: str = "compact") -> Sampling:
    """The sampling settings of a config section with temperature, top_k, top_p and max_new_tokens.

    Sampling stops at the tokens that end an answer in this style.
    """
    return section_sampling(section, chat.stop_ids(tokenizer) if style == "chat" else tokenizer.stop_ids)
