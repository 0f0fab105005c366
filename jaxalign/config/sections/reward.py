"""The reward of reinforcement learning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of, sum_of
from jaxalign.config.schema import field
from jaxalign.config.selectors import names_in
from jaxalign.errors import UserError
from jaxalign.registry.data_sources import data_source

REWARD_SOURCES = ("preference", "distilled", "model", "callable", "verifier", "ai_feedback")


@dataclasses.dataclass(frozen=True)
class Reward(Section):
    """What RL is rewarded by."""

    source: str = field("preference", "preference (the preference model), distilled (its small student), model (a reward model "
                        "from outside), callable (your own), verifier (the wanted answer), ai_feedback (the base's rating), "
                        "or a sum of these, as in preference+callable; docs/rewards.md.",
                        sum_of(*REWARD_SOURCES))
    weights: tuple[float, ...] = field((), "Weight of each part of a sum, in its order; empty: 1 each.")
    length_coef: float = field(0.0, "What a token beyond length_free costs.", at_least(0))
    length_free: int = field(0, "Tokens of a response that cost nothing.", at_least(0))
    model: str = field("", "For model: folder of a ...ForSequenceClassification with one label, in Hugging Face layout, with "
                       "its own tokenizer.")
    model_style: str = field("auto", "For model: how dialogues are written for it; auto: its chat template where there is one, "
                             "else hh.", one_of("auto", "chat", "hh", "compact"))
    model_max_length: int = field(0, "For model: tokens it reads at most, longer dialogues lose their oldest turns; 0: all its "
                                  "positions.", at_least(0))
    model_batch: int = field(16, "For model: texts in one forward pass, made a multiple of what the mesh splits.", at_least(1))
    model_dtype: str = field("float32", "For model: type of its parameters and activations.", one_of("float32", "bfloat16"))
    model_shift: float = field(0.0, "For model: taken off its raw score.")
    model_scale: float = field(1.0, "For model: what the shifted score is divided by; ppo.score_clip then clips it.", above(0))
    callable: str = field("", "For callable: 'package.module:function' or 'FILE.py:function', called as "
                          "(prompts, responses, **columns) -> scores.")
    verifier: str = field("number_match", "For verifier: the last number is the answer's, the text is the answer, or a "
                          "pattern is found (columns answer, answer and pattern).",
                          one_of("number_match", "exact_match", "regex_match"))
    principles: int = field(1, "For ai_feedback: principles drawn a response; their ratings are averaged.", at_least(1))
    while_sampling: bool = field(False, "For callable and verifier: called with the responses that have ended while others are "
                                        "sampled, a few at a time; for one that judges each by itself.")
    retries: int = field(2, "Further calls after one that fails.", at_least(0))
    timeout_s: float = field(60.0, "Seconds after which a call has failed.", above(0))
    backoff_s: float = field(1.0, "Seconds before the first retry; twice as many before each further one.", at_least(0))
    max_dropped_share: float = field(0.5, "Share of a batch without a score above which the run stops.", between(0.0, 1.0))

    def check(self, config: WholeConfig, name: str) -> None:
        """Every part of the reward must have what it needs."""
        if "ppo" not in config.stages:
            return
        parts = names_in(self.source)
        if self.weights and len(self.weights) != len(parts):
            raise UserError(f"config.reward.weights has {len(self.weights)} entries; config.reward.source {self.source!r} has "
                            f"{len(parts)}: give one weight each, or none")
        self._check_learnt(config, parts)
        self._check_callable(parts)
        self._check_verifier(config, parts)
        if self.length_free and not self.length_coef:
            raise UserError(f"config.reward.length_free is {self.length_free} but config.reward.length_coef is 0, so no token "
                            "costs anything: set length_coef, or leave length_free at 0")
        if "ai_feedback" in parts:
            _check_rating(config)

    def _check_learnt(self, config: WholeConfig, parts: tuple[str, ...]) -> None:
        learnt = not {"preference", "distilled"}.isdisjoint(parts)
        if config.ppo.score_clip is not None and not learnt and "model" not in parts:
            raise UserError(f"config.ppo.score_clip is {config.ppo.score_clip}; it clips a reward model's scores, and "
                            f"config.reward.source is {self.source!r}: leave score_clip at None")
        if ("model" in parts) != bool(self.model):
            remedy = "set model to its folder" if "model" in parts else "set source to 'model', or leave model empty"
            raise UserError(f"config.reward.model is {self.model!r} but config.reward.source is {self.source!r}; {remedy}")
        if learnt and "comparisons" not in data_source(config).provides:
            raise UserError(f"config.reward.source is {self.source!r}; with config.data.source {config.data.source!r} there is "
                            "no preference model: set it to 'verifier', 'callable' or 'model'")

    def _check_callable(self, parts: tuple[str, ...]) -> None:
        if "callable" not in parts and self.callable:
            raise UserError(f"config.reward.callable is {self.callable!r} but config.reward.source is {self.source!r}; set "
                            "source to 'callable', or leave callable empty")
        if self.while_sampling and not {"callable", "verifier"} & set(parts):
            raise UserError("config.reward.while_sampling is True, for a callable or a verifier, but config.reward.source is "
                            f"{self.source!r}: leave it at False")
        place, _, function = self.callable.rpartition(":")
        if "callable" in parts and not (place and function):
            raise UserError(f"config.reward.callable is {self.callable!r}; with config.reward.source 'callable' set it to "
                            "'package.module:function' or 'FILE.py:function'")

    def _check_verifier(self, config: WholeConfig, parts: tuple[str, ...]) -> None:
        if "verifier" not in parts:
            return
        source = data_source(config)
        if not source.answers:
            raise UserError(f"config.reward.source is {self.source!r}; the prompts of config.data.source "
                            f"{config.data.source!r} have no wanted answers to verify: set data.source to 'arithmetic' or "
                            "'prompts_jsonl'")
        if self.verifier == "regex_match" and not source.patterns:
            raise UserError(f"config.reward.verifier is 'regex_match', which reads a column of patterns; {source.name} has "
                            "answers: use 'number_match' or 'exact_match'")


def _check_rating(config: WholeConfig) -> None:
    """The base must have learnt to rate answers."""
    if not data_source(config).feedback:
        raise UserError("config.reward.source 'ai_feedback' asks the base for ratings, which it learns only in the embedded "
                        "world; set config.data.source to 'world', or choose another reward")
    if config.model.source == "scratch" and not config.world.ratings:
        raise UserError("config.reward.source is 'ai_feedback' but config.world.ratings is 0, so the base never sees an answer "
                        "rated: set world.ratings to 0.1, say")
