"""The parts of an RL run that the trainer `PPO` puts together, and the placement of their roles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxalign.config import PPOConfig
from jaxalign.config.schema import checked
from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.errors import UserError
from jaxalign.models.model import Model, Params
from jaxalign.parallel.role_meshes import moved
from jaxalign.parallel.sharding import Sharding
from jaxalign.placement.resolve import STRATEGIES
from jaxalign.rewards.base import Reward
from jaxalign.rewards.learnt import LearntReward
from jaxalign.rl.ahead import Scores
from jaxalign.rl.alarms import AlarmRun
from jaxalign.rl.placing import FLAT, check_options, place_roles, ppo_run
from jaxalign.rollout.sampling import Sampling
from jaxalign.steps.offload import FrozenRole

_PROBE = "Héllo, world! 3 + 4 = 7; 你好\n\tdef f(x): return x"
"""A text that the tokenizers of two families encode differently."""


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


def trainer_shardings(
    placement: Any, section: PPOConfig, policy: Model, reward: Reward
) -> Mapping[str, Sharding] | None:
    """The mesh of each role for the argument `placement` of `PPO`; None for flat.

    Raises:
      UserError: the argument is not a placement, the placement is not possible, or it moves the policy.
    """
    where = "PPO(placement)"
    if not isinstance(placement, str):
        entries = checked(placement, tuple[str, ...], where)
        strategy = "custom"
    else:
        entries, strategy = (), placement
        if strategy not in STRATEGIES[:-1]:
            raise UserError(f"{where} is {placement!r}; {', '.join(STRATEGIES[:-1])} or a list of entries such as "
                            "'policy+critic=0-3:fsdp=4' is expected")
    if strategy == FLAT:
        return None
    if policy.sharding.keep_gathered:
        raise UserError(f"{where} is {placement!r}, but the model was loaded with mesh.keep_gathered='always', which works "
                        "with placement 'flat' only; load it with 'never'")
    scorer = reward.scorer.model if isinstance(reward, LearntReward) else None
    _, shardings = place_roles(ppo_run(section, policy, scorer is not None, scorer), strategy, entries)
    check_options(section, shardings)
    if shardings["policy"].mesh != policy.sharding.mesh:
        raise UserError(f"{where} puts the policy on other devices or another mesh than it was loaded with; load it with "
                        "load_model(mesh=...) of that mesh on the first devices")
    return shardings


def placed_reward(reward: Reward, shardings: Mapping[str, Sharding]) -> Reward:
    """The reward with its model on the mesh of the role "reward"; a reward without a model of its own is returned as it is."""
    if not isinstance(reward, LearntReward):
        return reward
    sharding = shardings["reward"]
    with reward.role.on_device() as params:
        role = FrozenRole(moved(params, sharding))
    scorer = dataclasses.replace(reward.scorer, model=reward.scorer.model.on(sharding))
    return dataclasses.replace(reward, scorer=scorer, role=role)


def require_same_tokenizer(given: Tokenizer, expected: Tokenizer) -> None:
    """Raises UserError if a reward model's tokenizer differs from the policy's. Both read the same ids.

    Args:
      given: the tokenizer of the reward model.
      expected: the tokenizer of the policy.
    """
    own, size = given.vocab_size, expected.vocab_size
    if own != size:
        raise UserError(f"PPO(reward) has a tokenizer of {own} ids and the policy's has {size}; a RewardModel with the "
                        "policy's tokenizer is expected")
    if given.encode(_PROBE) != expected.encode(_PROBE):
        raise UserError(f"PPO(reward) has another tokenizer than the policy, although both have {own} ids; a RewardModel with "
                        "the policy's tokenizer is expected")
