"""Stage ppo: reinforcement learning."""

from __future__ import annotations

import dataclasses
import re

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, at_least_or, between, one_of, registered
from jaxalign.config.reading import chosen, require_fields, unless, when
from jaxalign.config.schema import field, like, section
from jaxalign.config.sections.compare import CompareConfig, check_helpful_share
from jaxalign.config.sections.shared import AUTO, Optimizer, SamplingFields, Trained
from jaxalign.errors import UserError
from jaxalign.registry.advantages import ADVANTAGES, AdvantageEstimator
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import data_source
from jaxalign.registry.policy_losses import POLICY_LOSSES
from jaxalign.registry.rewards import REWARDS

_ESTIMATOR = chosen("advantages", ADVANTAGES)
_LOSS = chosen("policy_loss", POLICY_LOSSES)
_CRITIC = chosen("advantages", ADVANTAGES, "needs_critic")
_ADAPTIVE = when("kl_controller", "adaptive")
_CORRECTED = when("sampler_correction", "truncate", "mask")
_MEASURED = unless("every", 0, "above 0")  # For alarms.
_SEVERAL_UPDATES = (unless("epochs", 1, "above 1"), unless("minibatches", 1, "above 1"))


@dataclasses.dataclass(frozen=True)
class Checks(Section):
    """What happens if an RL check fails: warn, recompute the old log-probabilities, or stop the run."""

    ratio: str = field("warn", "The ratio before an iteration's first update is not 1.", one_of("warn", "recompute", "stop"))
    reference_kl: str = field("warn", "At step 0, the KL to the reference is not 0 although policy and reference have the same "
                              "weights.", one_of("warn", "stop"))
    sampler_gap: str = field("warn", "The sampler's log-probabilities differ from the trainer's.",
                             one_of("warn", "recompute", "stop"))
    micro_batches: str = field("warn", "At step 0, loss or gradients depend on the micro-batches.", one_of("warn", "stop"))
    finite_gradients: str = field("warn", "A gradient is not finite; its update is skipped in either case.",
                                  one_of("warn", "stop"))
    step_zero: bool = field(True, "Run the five checks before the first update. Their program takes about as long to compile "
                            "as that of the update. False leaves them out, for repeated short runs of settings that have "
                            "passed.")


@dataclasses.dataclass(frozen=True)
class AlarmsConfig(Section):
    """Answers to held-out helpful prompts are measured during RL and compared with those of the policy before RL.

    A limit of None switches its alarm off. Shares and rises are fractions: 0.1 is 10 percentage points.
    """

    every: int = field(0, "Iterations between measurements on held-out helpful prompts; the last iteration is measured as "
                       "well. 0: none.", at_least(0))
    prompts: int = field(64, "Number of held-out helpful prompts, which RL then does not train on; at most half of the helpful "
                         "prompts.", at_least(1), _MEASURED)
    temperature: float = field(0.0, "Sampling temperature of the measured answers; 0 is greedy.", at_least(0), _MEASURED)
    action: str = field("warn", "What happens when an alarm fires: warn, stop (save a checkpoint and end the run with an "
                        "error) or best (end RL; the result is the measured policy with the highest mean score before the "
                        "alarm and without a crossed limit).", one_of("warn", "stop", "best"), _MEASURED)
    patience: int = field(2, "Consecutive measurements that must cross a limit before its alarm fires.", at_least(1), _MEASURED)
    judge: bool = field(False, "Whether the judge of config.feedback compares the answers with those of the policy before RL.",
                        None, _MEASURED)
    score_drop: float | None = field(0.5, "Largest fall of the mean score of the reward, in its units; None: no limit.",
                                     above(0), _MEASURED)
    min_win_rate: float | None = field(0.35, "Lowest win rate against the policy before RL; None: no limit.",
                                       between(0.0, 1.0), _MEASURED, when("judge", True))
    repetition_rise: float | None = field(0.15, "Largest rise of the mean share of repeated 4-grams of tokens in an answer; "
                                          "None: no limit.", between(0.0, 1.0), _MEASURED)
    min_length_ratio: float | None = field(0.5, "Lowest ratio of the mean length to that of the policy before RL; None: no "
                                           "limit.", between(0.0, 1.0), _MEASURED)
    max_length_ratio: float | None = field(2.0, "Highest ratio of the mean length to that of the policy before RL; None: no "
                                           "limit.", at_least(1.0), _MEASURED)
    unfinished_rise: float | None = field(0.2, "Largest rise of the share of answers that did not end; None: no limit.",
                                          between(0.0, 1.0), _MEASURED)
    refusal_rise: float | None = field(0.1, "Largest rise of the share of answers that refuse; None: no limit.",
                                       between(0.0, 1.0), _MEASURED)
    refusals: tuple[str, ...] = field((), "Regular expressions that match the beginning of a refusal, in any case; empty: the "
                                      "English patterns of docs/ppo.md.", None, _MEASURED)

    def check(self, config: WholeConfig, name: str) -> None:
        for pattern in self.refusals:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"config.{name}.refusals has {pattern!r}, which is not a regular expression ({error}); correct "
                                "it") from None


@dataclasses.dataclass(frozen=True)
class PPOConfig(SamplingFields, Trained):
    """Reinforcement learning on the reward of config.reward: PPO and related methods, with or without a critic."""

    iterations: int = field(28, "Rounds of sampling and training.", at_least(1))
    prompts: int = field(2000, "Distinct prompts to sample from; the loader cycles through them.", at_least(1))
    batch: int = field(64, "Responses per iteration.", between(1, 1 << 20))
    helpful_share: float | None = like(CompareConfig, "helpful_share")
    group_size: int = field(1, "Responses per prompt in an iteration; rloo and grpo need at least 2.", at_least(1))
    temperature: float = like(SamplingFields, "temperature", default=0.7, doc="Sampling temperature; all log-probabilities are "
                              "computed at this temperature.")
    max_new_tokens: int = like(SamplingFields, "max_new_tokens", default=56)
    sample_ahead: bool = field(False, "Sample the responses of the next iteration before the update of this one, with weights "
                               "that are one update old. If config.placement gives the generator devices apart from policy "
                               "and critic, both run at the same time.")
    epochs: int = field(2, "Passes over the rollout buffer, each in a new random order.", at_least(1))
    minibatches: int = field(2, "Optimizer steps per pass.", at_least(1))
    micro_batch_tokens: int | str = field(0, "Maximum tokens (of packed prompts and responses) per device in a micro-batch; "
                                          "results do not depend on it. 0: 1/16 of the maximum tokens of a minibatch, but at "
                                          "least 768; auto: the fastest size that fits on the devices.", at_least_or(0, AUTO))
    advantages: str = field("gae", "The advantage estimator. With a critic: gae, reinforce (return minus value) or vtrace. "
                            "Without: rloo, grpo, reinforce_pp or remax.", registered(ADVANTAGES))
    critic: str = field("separate", "The critic: a separate model, or a value head on the policy's trunk (shared).",
                        one_of("separate", "shared"), _CRITIC)
    group_scale: str = field("std", "For grpo: divide by the group's standard deviation (std), or not (none, as in Dr. GRPO).",
                             one_of("std", "none"), _ESTIMATOR)
    skip_equal_groups: bool = field(False, "Exclude groups of equal scores from the losses and from the counts that normalise "
                                    "them (DAPO).")
    gamma: float = field(1.0, "Discount (gae, reinforce, vtrace, reinforce_pp).", between(0.0, 1.0), _ESTIMATOR)
    lam: float = field(0.95, "Lambda of generalised advantage estimation (gae, vtrace).", between(0.0, 1.0), _ESTIMATOR)
    policy_loss: str = field("clip", "The policy loss: PPO's clipped ratio, GSPO's ratio of whole responses, CISPO's clipped "
                             "weight, or plain REINFORCE.", registered(POLICY_LOSSES))
    clip: float | None = field(None, "Clip the policy's ratio to [1 - clip, 1 + clip]; None: the policy loss's own range "
                               "(0.2; for gspo 3e-4 below and 4e-4 above).", above(0), _LOSS)
    clip_high: float | None = field(None, "Clip the ratio at 1 + clip_high above; None: clip, or the policy loss's own range.",
                                    above(0), _LOSS)
    dual_clip: float | None = field(None, "Upper bound of the ratio for negative advantages (policy_loss=clip); None: no "
                                    "bound.", above(1), _LOSS)
    log_ratio_limit: float | None = field(None, "Limit the log-ratio of a token to [-log_ratio_limit, log_ratio_limit] in the "
                                          "policy loss and in the k3 estimate of the KL, with no gradient beyond; 10 is "
                                          "usual. None: no limit; an update whose gradient overflows is skipped.", above(0))
    aggregation: str = field("token_mean", "How token losses are aggregated; see docs/ppo.md.",
                             one_of("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"))
    entropy_coef: float = field(0.0, "Weight of the entropy bonus.", at_least(0))
    value_clip: float | None = field(0.2, "Maximum change of the critic's value of a state since the rollout; None: no limit.",
                                     at_least(0), _CRITIC)
    value_loss: str = field("squared", "The critic's loss: half the squared error, or the Huber loss.",
                            one_of("squared", "huber"), _CRITIC)
    huber_delta: float = field(1.0, "The error above which the Huber loss is linear (value_loss=huber).", above(0), _CRITIC,
                               when("value_loss", "huber"))
    value_coef: float = field(0.1, "Weight of the value loss.", at_least(0), _CRITIC)
    critic_warmup: int = field(0, "Number of initial iterations that train only the critic.", at_least(0), _CRITIC,
                               when("critic", "separate"))
    kl_in: str = field("reward", "Subtract the KL penalty from the reward, or add it to the loss.", one_of("reward", "loss"))
    kl_coef: float = field(0.25, "Weight of the KL penalty; with the adaptive controller, its initial value.", at_least(0))
    kl_controller: str = field("fixed", "Keep kl_coef fixed, or adapt it to reach kl_target.", one_of("fixed", "adaptive"))
    kl_target: float = field(6.0, "Target KL in nats per response (kl_controller=adaptive).", above(0), _ADAPTIVE)
    kl_horizon: int = field(10_000, "Number of responses over which the controller adapts (kl_controller=adaptive).",
                            at_least(1), _ADAPTIVE)
    kl_estimator: str = field("k1", "KL penalty per token: k1 (log-ratio), abs (its absolute value), k2 (half its square), k3 "
                              "(r - 1 - log r) or full (the KL over the whole vocabulary).",
                              one_of("k1", "abs", "k2", "k3", "full"))
    whiten_advantages: bool = field(True, "Normalise advantages to mean 0 and standard deviation 1 over the whole minibatch.")
    missing_eos: str = field("replace", "The score of a response without a stop token: unchanged (none), replaced by "
                             "missing_eos_value, reduced by it (penalty), or zero.",
                             one_of("none", "replace", "penalty", "zero"))
    missing_eos_value: float = field(-1.0, "The new score (replace), or the number to subtract (penalty).", None,
                                     when("missing_eos", "replace", "penalty"))
    required_share: float = field(0.0, "Stop if a smaller share of an iteration's responses has a stop token. If it is below "
                                  "0.5, and missing_eos is not none, the run warns.", between(0.0, 1.0))
    overlong_buffer: int = field(0, "Number of tokens before max_new_tokens over which a length penalty grows to 1 (DAPO); 0: "
                                 "no penalty.", at_least(0))
    score_clip: float | None = field(None, "Clip the finite scores of reward models to [-score_clip, score_clip]; None: no "
                                     "clipping.", above(0), chosen("reward.source", REWARDS, "is_model"))
    target_kl: float | None = field(None, "Skip the remaining updates of an iteration when the approximate KL to the sampling "
                                    "policy exceeds this; None: never.", above(0), _SEVERAL_UPDATES)
    sampler_correction: str = field("none", "Weight losses by the ratio of trainer to sampler probability: none (no weights), "
                                    "truncate (capped at correction_cap) or mask (0 above correction_cap).",
                                    one_of("none", "truncate", "mask"))
    correction_level: str = field("token", "The ratio to use: that of a token, that of a whole response (sequence), or the "
                                  "geometric mean over a response.", one_of("token", "sequence", "geometric"), _CORRECTED)
    correction_cap: float = field(2.0, "Maximum weight of the sampler correction.", above(0), _CORRECTED)
    sampler_tolerance: float = field(0.0, "Largest allowed difference between the sampler's and the trainer's log-prob of a "
                                     "token, and between the first ratio and 1; 0: 1e-3 in float32, 0.0625 in TensorFloat-32 "
                                     "and float16, 0.5 in bfloat16.", at_least(0))
    checks: Checks = section(Checks(), "")
    alarms: AlarmsConfig = section(AlarmsConfig(), "")
    optimizer: Optimizer = section(Optimizer(learning_rate=1.5e-4, schedule="linear", eps=1e-5), "The policy's optimizer.")
    critic_optimizer: Optimizer = section(Optimizer(learning_rate=5e-4, schedule="linear", eps=1e-5),
                                          "The critic's optimizer.", _CRITIC, when("critic", "separate"))
    checkpoint_every: int = like(Trained, "checkpoint_every", default=5, doc="Iterations between checkpoints.")

    @property
    def asks_to_compare(self) -> bool:
        """Whether the alarms ask the judge to compare answers."""
        return self.alarms.every > 0 and self.alarms.judge

    def check(self, config: WholeConfig, name: str) -> None:
        check_helpful_share(config, name, self.helpful_share)
        self._check_alarms(config)
        self._check_losses()
        estimator = ADVANTAGES.get(self.advantages, "config.ppo.advantages")
        self._check_ahead(config, estimator.needs_greedy)
        require_fields(estimator, "advantage estimator", self, "ppo")
        require_fields(POLICY_LOSSES.get(self.policy_loss, "config.ppo.policy_loss"), "policy loss", self, "ppo")
        if self.batch % self.group_size:
            raise UserError(f"config.ppo.batch is {self.batch} responses; it must be a multiple of config.ppo.group_size "
                            f"({self.group_size})")
        if estimator.needs_groups and self.group_size < 2:
            raise UserError(f"config.ppo.group_size is {self.group_size}; advantages {self.advantages!r} compare the responses "
                            "to one prompt, so at least 2 are needed")
        self._check_compared(estimator)
        if self.skip_equal_groups and self.group_size < 2:
            raise UserError("config.ppo.skip_equal_groups is set but config.ppo.group_size is 1: every group would be equal")
        if self.critic_warmup >= self.iterations:
            raise UserError(f"config.ppo.critic_warmup is {self.critic_warmup}; it must be below config.ppo.iterations "
                            f"({self.iterations}), or the policy is never trained")
        if self.sampler_correction != "none" and estimator.needs_trainer_logprobs:
            raise UserError(f"config.ppo.sampler_correction is {self.sampler_correction!r}; advantages {self.advantages!r} "
                            "already correct for the sampler: leave it at 'none'")
        if self.micro_batch_tokens != AUTO and 0 < self.micro_batch_tokens <= self.max_new_tokens:
            raise UserError(f"config.ppo.micro_batch_tokens is {self.micro_batch_tokens}; a prompt and "
                            f"config.ppo.max_new_tokens ({self.max_new_tokens}) must fit: raise it, or set it to 0")
        if self.overlong_buffer > self.max_new_tokens:
            raise UserError(f"config.ppo.overlong_buffer is {self.overlong_buffer}; it must be at most "
                            f"config.ppo.max_new_tokens ({self.max_new_tokens})")

    def _check_compared(self, estimator: AdvantageEstimator) -> None:
        """Checks that an estimator that compares responses to one prompt does not give only advantages of 0."""
        if not (estimator.needs_groups or estimator.needs_greedy):
            return
        if self.top_k == 1 and self.advantages in ADVANTAGES.builtin:
            raise UserError(f"config.ppo.top_k is 1, which makes all responses to a prompt equal; advantages "
                            f"{self.advantages!r} compare them, so all would be 0: raise top_k, or set it to 0, which samples "
                            "from all tokens")
        if self.whiten_advantages and self.batch == self.minibatches and self.advantages in ADVANTAGES.builtin:
            raise UserError(f"config.ppo.minibatches is {self.minibatches} and config.ppo.batch is {self.batch}, so each "
                            "minibatch is one response, whose tokens have the same advantage with advantages "
                            f"{self.advantages!r}; config.ppo.whiten_advantages would make it 0: set that to False, or lower "
                            "minibatches")

    def _check_ahead(self, config: WholeConfig, needs_greedy: bool) -> None:
        """Checks that nothing needs the newest weights or the rollout in progress."""
        if not self.sample_ahead:
            return
        where = "config.ppo.sample_ahead is set"
        if needs_greedy:
            raise UserError(f"{where}, but advantages {self.advantages!r} also sample greedy responses with the newest "
                            "weights; choose another estimator, or leave sample_ahead at False")
        if config.reward.while_sampling:
            raise UserError(f"{where}, but config.reward.while_sampling is set, which scores responses while they are sampled; "
                            "set one of them to False")
        if {self.checks.ratio, self.checks.sampler_gap} != {"warn"}:
            raise UserError(f"{where}, but config.ppo.checks.ratio or sampler_gap is not 'warn'; responses of older weights do "
                            "not have the ratio 1, so leave both at 'warn'")

    def _check_alarms(self, config: WholeConfig) -> None:
        """Checks that there are helpful prompts to measure, and that the reward can score them."""
        if not self.alarms.every:
            return
        source = data_source(config)
        where = f"config.ppo.alarms.every is {self.alarms.every}, which needs helpful prompts"
        if source.name == "prompts_jsonl" and not config.data.helpful:
            raise UserError(f"{where}, but config.data.helpful is empty: set it to a file, or alarms.every to 0")
        if source.prompts is None or source.alphabet or (source.rows and not config.data.helpful):
            raise UserError(f"{where}, but config.data.source {source.name!r} has none: set it to 'prompts_jsonl' and "
                            "config.data.helpful to a file, or alarms.every to 0")
        if "verifier" in names_in(config.reward.source):
            raise UserError(f"{where} that the reward can score, but config.reward.source has 'verifier', which reads expected "
                            "answers: choose another reward, or set alarms.every to 0")

    def _check_losses(self) -> None:
        # A step of the adaptive controller reduces the coefficient by at most the fraction batch / (5 horizon).
        if self.kl_controller == "adaptive" and self.batch >= 5 * self.kl_horizon:
            raise UserError(f"config.ppo.kl_horizon is {self.kl_horizon}; with the adaptive controller it must be above "
                            f"1/5 of config.ppo.batch ({self.batch})")
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            raise UserError("config.ppo.kl_coef is 0 and config.ppo.kl_controller is 'adaptive', which multiplies the "
                            "coefficient in each iteration, so it would stay at 0: set kl_coef above 0, or kl_controller to "
                            "'fixed'")
        if self.missing_eos == "penalty" and self.missing_eos_value < 0:
            raise UserError(f"config.ppo.missing_eos is 'penalty' and config.ppo.missing_eos_value is "
                            f"{self.missing_eos_value}; it is subtracted from the score, so it must be at least 0")
        if self.clip is not None and self.clip > 1:
            raise UserError(f"config.ppo.clip is {self.clip}; a ratio cannot fall below 0, so it must be at most 1")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise UserError("config.ppo.kl_in is 'loss' and config.ppo.kl_estimator is 'k1'; its gradient is 0 on average, so "
                            "it would not constrain the policy: choose k2, k3, abs or full")
