"""A complete RL run on a list of prompts, for stage ppo and for `PPO`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax

from jaxalign.data.tokenizers.load import Tokenizer
from jaxalign.models.model import Params
from jaxalign.parallel.ahead import Ahead
from jaxalign.rewards.base import Reward
from jaxalign.rl.ahead import Scores, compile_ahead
from jaxalign.rl.alarms import AlarmRun
from jaxalign.rl.iteration import Iteration
from jaxalign.rl.monitor import OnChecks
from jaxalign.rl.prompts import PromptStream
from jaxalign.rl.state import PPOSetup, PPOState, abstract_ppo_state, init_ppo_state, with_value_head, without_value_head
from jaxalign.rollout.engine import Engine
from jaxalign.rollout.sampler import Sampler, make_sampler
from jaxalign.rollout.sampling import Sampling
from jaxalign.training.loop import Loop, Step, Training
from jaxalign.training.offload import FrozenRole


@dataclasses.dataclass(frozen=True)
class Roles:
    """The models of a run and the functions that give their weights.

    Attributes:
      reward: scores responses.
      reference: the parameters that the KL is measured against, joined with `frozen`.
      policy: `policy(reference's parameters) -> the policy's trained parameters`, in buffers that training may donate.
      critic: the same for a separate critic; not called if there is none.
      frozen: the base under the adapters, or None.
    """

    reward: Reward
    reference: FrozenRole
    policy: Callable[[Params], Params]
    critic: Callable[[Params], Params]
    frozen: Params | None = None


class Reinforcement:
    """One RL run.

    Args:
      setup: models, optimizers and options.
      stream: the prompts.
      sampling: the sampling settings.
      tokenizer: decodes responses for rewards that read text.
      max_length: the maximum length of prompt plus response, in tokens.

    Attributes:
      training: the running loop, whose `state` is the newest `PPOState`; None before `steps` starts.

    Raises:
      UserError: the mesh does not divide `config.ppo.batch`.
    """

    def __init__(
        self, setup: PPOSetup, stream: PromptStream, sampling: Sampling, tokenizer: Tokenizer, max_length: int
    ):
        self.setup, self.stream, self.sampling, self.tokenizer = setup, stream, sampling, tokenizer
        self.engine = Engine(setup.policy, stream.batch, max_length, stream.width)
        self.training: Training | None = None

    def compile_ahead(
        self, ahead: Ahead, scores: Scores, frozen: Params | None, reference: Params, checked: bool
    ) -> None:
        """Starts compiling the first iteration's programs. Takes the arguments of `rl.ahead.compile_ahead`."""
        first = self.stream.at(0).ids
        compile_ahead(ahead, self.setup, self.engine, self.sampling, first, scores, frozen, reference, checked)

    def steps(
        self, roles: Roles, loop: Callable[..., Loop], key: jax.Array, sampler: Sampler | None = None,
        offload_optimizer: bool = False, on_checks: OnChecks | None = None, alarms: AlarmRun | None = None,
    ) -> Iterator[Step]:
        """Trains and yields each iteration.

        Args:
          roles: the models and their weights.
          loop: `loop(total_steps, checkpoint_every, **fields) -> Loop`.
          key: the PRNG key of the training state.
          sampler: samples the responses; None for this process's engine.
          offload_optimizer: keep optimizer states in host memory between updates.
          on_checks: receives the step-0 checks.
          alarms: measures the policy during RL and may end it; None for no alarms.

        Raises:
          UserError: a check or an alarm that is configured to stop the run does so, or a plug-in returns an invalid result.
        """
        setup = self.setup
        iteration = Iteration(
            setup, self.stream, make_sampler(sampler or "local", self.engine, "PPO(sampler)"), self.engine.padding,
            self.sampling, roles.reward, self.tokenizer, roles.reference, roles.frozen, offload_optimizer, on_checks,
        )
        section = setup.config
        fields = {"shown": ("score", "kl_k1"), "timeline": iteration.timeline}
        if alarms is not None:
            fields["stop"] = lambda state, completed: alarms.ended(completed)
        made = loop(section.iterations, section.checkpoint_every, **fields)

        def init() -> PPOState:
            with roles.reference.on_device() as start:
                policy = with_value_head(setup, roles.policy(start))
                critic = roles.critic(start) if setup.owns_critic else None
            return iteration.rest(init_ppo_state(setup, policy, critic, key))

        step = iteration if alarms is None else functools.partial(alarms.step, iteration)
        self.training = made.begin(init, iteration.rest(abstract_ppo_state(setup)), step)
        yield from self.training
        iteration.settle()
        if alarms is not None:
            alarms.settle()

    @property
    def policy_params(self) -> Params:
        """The newest trained parameters, without a value head. The next step donates them."""
        return without_value_head(self.training.state.policy.params)
