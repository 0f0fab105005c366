"""Stage ppo: reinforcement learning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.schema import field, section
from jaxalign.config.sections.optimizer import Optimizer
from jaxalign.errors import UserError
from jaxalign.registry.advantages import ADVANTAGES

ADVANTAGES_WITH_CRITIC = tuple(record.name for record in ADVANTAGES if record.needs_critic)

@dataclasses.dataclass(frozen=True)
class Checks(Section):
    """What a failed check of RL leads to: a warning, the end of the run, or old log-probabilities computed again."""

    ratio: str = field("warn", "The ratio before an iteration's first update is not 1.", one_of("warn", "recompute", "stop"))
    reference_kl: str = field("warn", "At step 0, a KL to the equal reference.", one_of("warn", "stop"))
    sampler_gap: str = field("warn", "The sampler's log-probabilities are not the trainer's.",
                             one_of("warn", "recompute", "stop"))
    micro_batches: str = field("warn", "At step 0, loss or gradients depend on the micro-batches.", one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is left out in any case.",
                                  one_of("warn", "stop"))


@dataclasses.dataclass(frozen=True)
class Ppo(Section):
    """Reinforcement learning against config.reward: PPO, and its relatives without a critic."""

    iterations: int = field(28, "Rounds of sampling and learning.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader goes round them.", at_least(1))
    batch: int = field(64, "Responses of an iteration.", at_least(1))
    group_size: int = field(1, "Responses to each prompt of an iteration; rloo and grpo need at least 2.", at_least(1))
    max_new_tokens: int = field(56, "Longest response.", at_least(1))
    temperature: float = field(0.7, "Sampling temperature; log-probabilities are taken under it everywhere.", above(0))
    top_k: int = field(0, "Sample from the k likeliest tokens; 0: from all.", at_least(0))
    top_p: float = field(1.0, "Sample from the smallest set of this probability.", between(1e-6, 1.0))
    epochs: int = field(2, "Passes over the rollout buffer, freshly shuffled each.", at_least(1))
    minibatches: int = field(2, "Optimizer steps a pass.", at_least(1))
    micro_batch_tokens: int = field(0, "Most tokens, of prompts and responses packed together, that a device computes at once; "
                                    "results are the same. 0: a sixteenth of what they could need, at least 768.", at_least(0))
    advantages: str = field("gae", "With a critic: gae, reinforce (returns less the value), vtrace; without one: rloo, grpo, "
                            "reinforce_pp, remax.",
                            one_of(*ADVANTAGES.names()))
    critic: str = field("separate", "Where there is a critic: a model of its own, or a value head on the policy's trunk.",
                        one_of("separate", "shared"))
    group_scale: str = field("std", "grpo: divide by the group's standard deviation, or not (Dr. GRPO).",
                             one_of("std", "none"))
    skip_equal_groups: bool = field(False, "Leave out groups whose scores are all equal (DAPO), in the counts too.")
    gamma: float = field(1.0, "Discount (gae, reinforce, vtrace, reinforce_pp).", between(0.0, 1.0))
    lam: float = field(0.95, "Lambda of generalised advantage estimation (gae, vtrace).", between(0.0, 1.0))
    policy_loss: str = field("clip", "PPO's clipped ratio, GSPO's of whole responses, CISPO's clipped weight, or plain "
                             "REINFORCE.", one_of("clip", "gspo", "cispo", "plain"))
    clip: float = field(0.2, "The policy's ratio is clipped to 1 - clip .. 1 + clip.", above(0))
    clip_high: float | None = field(None, "The ratio's upper bound is 1 + clip_high; None: clip.", above(0))
    dual_clip: float | None = field(None, "For negative advantages the ratio counts as at most this (clip); None: no limit.",
                                    above(1))
    aggregation: str = field("token_mean", "How the losses of tokens become one number: docs/ppo.md.",
                             one_of("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"))
    entropy_coef: float = field(0.0, "Weight of the entropy bonus.", at_least(0))
    value_clip: float | None = field(0.2, "How far a value may move from the rollout's; None: no limit.",
                                     at_least(0))
    value_loss: str = field("squared", "The critic's loss: half the square, or Huber's.", one_of("squared", "huber"))
    huber_delta: float = field(1.0, "Where Huber's loss turns from square to line (value_loss=huber).", above(0))
    value_coef: float = field(0.1, "Weight of the value loss.", at_least(0))
    critic_warmup: int = field(0, "Iterations at the start in which the critic alone learns.", at_least(0))
    kl_in: str = field("reward", "The KL penalty is taken off the reward, or added to the loss.", one_of("reward", "loss"))
    kl_coef: float = field(0.15, "Weight of the KL penalty; its start where adaptive.", at_least(0))
    kl_controller: str = field("fixed", "Keep kl_coef, or steer it towards kl_target.", one_of("fixed", "adaptive"))
    kl_target: float = field(6.0, "KL aimed at, in nats a response (kl_controller=adaptive).", above(0))
    kl_horizon: int = field(10_000, "Responses over which the controller acts (kl_controller=adaptive).", at_least(1))
    kl_estimator: str = field("k1", "A token's KL penalty: log-ratio, its size, half its square, r - 1 - log r, or the "
                              "KL over the whole vocabulary.", one_of("k1", "abs", "k2", "k3", "full"))
    whiten_advantages: bool = field(True, "Advantages get mean 0 and deviation 1 over the whole minibatch.")
    missing_eos: str = field("replace", "Without an end: leave the score, replace it by missing_eos_value, subtract "
                             "that value, or score zero.", one_of("none", "replace", "penalty", "zero"))
    missing_eos_value: float = field(-1.0, "The score (replace) or what is subtracted from it (penalty).")
    overlong_buffer: int = field(0, "The last so many tokens below max_new_tokens cost up to 1 (DAPO); 0: nothing.",
                                 at_least(0))
    score_clip: float | None = field(None, "Scores are clipped to +-score_clip; None: not at all.", above(0))
    target_kl: float | None = field(None, "An iteration stops learning above this KL; None: never.", above(0))
    sampler_correction: str = field("none", "Losses are weighted by trainer / sampler probability: not at all, up to "
                                    "correction_cap, or with 0 beyond it.", one_of("none", "truncate", "mask"))
    correction_level: str = field("token", "That weight is a token's own, a response's, or its geometric mean.",
                                  one_of("token", "sequence", "geometric"))
    correction_cap: float = field(2.0, "The largest weight of the correction.", above(0))
    sampler_tolerance: float = field(1e-3, "Largest gap of a token's log-prob between sampler and trainer, and of the first "
                                     "ratio from 1.", above(0))
    checks: Checks = section(Checks(), "What a failed check leads to.")
    optimizer: Optimizer = section(Optimizer(learning_rate=3e-4, schedule="linear", eps=1e-5), "The policy's.")
    critic_optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", eps=1e-5), "The critic's.")
    checkpoint_every: int = field(5, "Iterations between checkpoints.", at_least(1))

    def check(self, config: WholeConfig, name: str) -> None:
        self._check_losses()
        self._check_groups()
        self._check_critic()
        self._check_sampler()
        if 0 < self.micro_batch_tokens <= self.max_new_tokens:
            raise UserError(f"config.ppo.micro_batch_tokens is {self.micro_batch_tokens}; a prompt and "
                            f"config.ppo.max_new_tokens ({self.max_new_tokens}) must fit: raise it, or set it to 0")
        if self.overlong_buffer > self.max_new_tokens:
            raise UserError(f"config.ppo.overlong_buffer is {self.overlong_buffer}; it must be at most "
                            f"config.ppo.max_new_tokens ({self.max_new_tokens})")

    def _check_losses(self) -> None:
        # A step of the adaptive controller subtracts at most batch / (5 horizon) of the coefficient.
        if self.kl_controller == "adaptive" and self.batch >= 5 * self.kl_horizon:
            raise UserError(f"config.ppo.kl_horizon is {self.kl_horizon}; with the adaptive controller it must be above a "
                            f"fifth of config.ppo.batch ({self.batch})")
        if self.missing_eos == "penalty" and self.missing_eos_value < 0:
            raise UserError(f"config.ppo.missing_eos is 'penalty' and config.ppo.missing_eos_value is "
                            f"{self.missing_eos_value}; it is subtracted from the score, so it must be at least 0")
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise UserError(f"config.ppo.dual_clip is {self.dual_clip}, which belongs to policy_loss 'clip'; it is "
                            f"{self.policy_loss!r}: leave dual_clip at None")
        if self.clip > 1:
            raise UserError(f"config.ppo.clip is {self.clip}; a ratio cannot fall below 1 - clip, so it must be at most 1")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise UserError("config.ppo.kl_in is 'loss' and config.ppo.kl_estimator is 'k1', whose gradient is 0 on average: "
                            "the policy would not be held back; choose k2, k3, abs or full")

    def _check_groups(self) -> None:
        if self.batch % self.group_size:
            raise UserError(f"config.ppo.batch is {self.batch} responses; it must be a multiple of config.ppo.group_size "
                            f"({self.group_size})")
        if ADVANTAGES.get(self.advantages, "config.ppo.advantages").needs_groups and self.group_size < 2:
            raise UserError(f"config.ppo.group_size is {self.group_size}; advantages {self.advantages!r} compare the responses "
                            "to one prompt, so at least 2 are needed")
        if self.skip_equal_groups and self.group_size < 2:
            raise UserError("config.ppo.skip_equal_groups is set but config.ppo.group_size is 1: every group would be equal")

    def _check_critic(self) -> None:
        if self.critic_warmup >= self.iterations:
            raise UserError(f"config.ppo.critic_warmup is {self.critic_warmup}; it must be below config.ppo.iterations "
                            f"({self.iterations}), or the policy never learns")
        has_critic = ADVANTAGES.get(self.advantages, "config.ppo.advantages").needs_critic
        if self.critic_warmup and not has_critic:
            raise UserError(f"config.ppo.critic_warmup is {self.critic_warmup}; advantages {self.advantages!r} have no critic")
        if self.critic == "shared" and not has_critic:
            raise UserError(f"config.ppo.critic is 'shared'; advantages {self.advantages!r} have no critic: leave it at "
                            "'separate'")
        if self.critic == "shared" and self.critic_warmup:
            raise UserError(f"config.ppo.critic_warmup is {self.critic_warmup}; a value head on the policy's trunk cannot "
                            "learn without the policy: set ppo.critic to 'separate'")

    def _check_sampler(self) -> None:
        if self.sampler_correction != "none" and self.advantages == "vtrace":
            raise UserError(f"config.ppo.sampler_correction is {self.sampler_correction!r}; advantages 'vtrace' correct for "
                            "the sampler themselves: leave it at 'none'")
        if self.sampler_correction == "none" and (self.correction_level != "token" or self.correction_cap != 2.0):
            raise UserError("config.ppo.correction_level or correction_cap is set but config.ppo.sampler_correction is 'none', "
                            "so nothing is corrected: set it to 'truncate' or 'mask'")
