"""The parts of an RL run that the trainer `PPO` puts together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.model import Params
from jaxalign.parallel.sharding import Sharding
from jaxalign.rewards.base import Reward
from jaxalign.rl.ahead import Scores
from jaxalign.rl.alarms import AlarmRun
from jaxalign.rollout.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class PPOParts:
    """The parts of an RL run other than the policy and the prompts. Functions are called while programs compile.

    Attributes:
      tokenizer: decodes responses for rewards that read text.
      sampling: temperature, top-k, top-p, the maximum number of new tokens and the ids that end a response.
      max_length: the maximum length of prompt plus response, in tokens.
      reward: makes the reward.
      reference: reads the joined parameters that the KL is measured against; None for the initial policy.
      critic: reads the trained parameters of a separate critic, in buffers that training may donate; None for the policy's
        trunk with a zero value head.
      sampler: samples the responses (`rollout.sampler.make_sampler`); None for this process's engine.
      sampler_name: the field or argument that gives the sampler, for messages.
      scores: how the reward computes scores, for compilation while weights are read; None for no such compilation.
      abstract_start: the reference's joined parameters as ShapeDtypeStructs; needed with `scores`.
      offload: the arrays kept in host memory while no program reads them, as in `config.mesh.offload`.
      alarms: makes the alarms, which measure the policy during RL and may end it; None for no alarms.
      stop: texts that end a response.
      shardings: the mesh of each role that `placement.resolve` places; None: all roles share the policy's mesh and, where they
        run one after another, its programs.
    """

    tokenizer: Tokenizer
    sampling: Sampling
    max_length: int
    reward: Callable[[], Reward]
    reference: Callable[[], Params] | None = None
    critic: Callable[[], Params] | None = None
    sampler: Any = None
    sampler_name: str = "PPO(sampler)"
    scores: Scores | None = None
    abstract_start: Params | None = None
    offload: tuple[str, ...] = ()
    alarms: Callable[[], AlarmRun] | None = None
    stop: tuple[str, ...] = ()
    shardings: Mapping[str, Sharding] | None = None
