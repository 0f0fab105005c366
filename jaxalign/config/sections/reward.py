"""The reward of reinforcement learning."""

from __future__ import annotations

import dataclasses

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of, registered
from jaxalign.config.reading import ReadBy, chosen, unless
from jaxalign.config.schema import field
from jaxalign.errors import UserError
from jaxalign.registry.core import names_in
from jaxalign.registry.data_sources import DATA_SOURCES, DataSourceRecord, data_source
from jaxalign.registry.judges import judge_record
from jaxalign.registry.rewards import REWARDS, RewardSource, reward_records
from jaxalign.registry.stages import made_before

_SOURCE = chosen("source", REWARDS)
_IN_SUMS = ReadBy(
    "source", lambda value, name: len(names_in(value)) > 1 or _SOURCE.reads(value, name),
    lambda value, name: f"{_SOURCE.readers(value, name)}, or to a sum",
)
"""As `_SOURCE`, and also read by every sum."""
_MISSING = {
    "comparisons": "there is no preference model",
    "answers": "there are no expected answers to compare with",
    "feedback": "the base model does not learn to rate answers",
}


@dataclasses.dataclass(frozen=True)
class RewardConfig(Section):
    """The reward of reinforcement learning."""

    source: str = field("preference", "The reward: preference (the preference model), distilled (its student), model (an "
                        "external reward model), callable (your own function), verifier (comparison with the expected "
                        "answer), ai_feedback (the base model's rating), or a sum such as preference+callable; "
                        "see docs/rewards.md.", registered(REWARDS, sums=True))
    weights: tuple[float, ...] = field((), "Weights of the parts of a sum, in the same order; empty: 1 each.")
    length_coef: float = field(0.0, "Penalty per token after the first length_free tokens.", at_least(0))
    length_free: int = field(0, "Number of tokens without penalty.", at_least(0), unless("length_coef", 0.0, "above 0"))
    model: str = field("", "For model: folder of a ...ForSequenceClassification with one label, in Hugging Face format, with "
                       "its own tokenizer.", None, _SOURCE)
    model_style: str = field("auto", "For model: text format of its dialogues (as data.style); auto: its chat template if it "
                             "has one, else hh.", one_of("auto", "chat", "hh", "compact"), _SOURCE)
    model_max_length: int = field(0, "For model: maximum length of its input in tokens; longer dialogues lose their oldest "
                                  "turns. 0: the model's own maximum.", at_least(0), _SOURCE)
    model_batch: int = field(16, "For model: texts per forward pass, rounded up to a multiple of the mesh's batch axes.",
                             at_least(1), _SOURCE)
    model_dtype: str = field("float32", "For model: dtype of its parameters and activations.", one_of("float32", "bfloat16"),
                             _SOURCE)
    model_shift: float = field(0.0, "For model: number to subtract from its raw score.", None, _SOURCE)
    model_scale: float = field(1.0, "For model: divisor of the shifted score, before ppo.score_clip.", above(0),
                               _SOURCE)
    callable: str = field("", "For callable: 'package.module:function' or 'FILE.py:function', called as "
                          "(prompts, responses, **columns) -> scores.", None, _SOURCE)
    verifier: str = field("number_match", "For verifier: number_match (the last number equals that of the column answer), "
                          "exact_match (the text equals the column answer) or regex_match (the column pattern matches).",
                          one_of("number_match", "exact_match", "regex_match"), _SOURCE)
    principles: int = field(1, "For ai_feedback: principles drawn per response; their ratings are averaged.", at_least(1),
                            _SOURCE)
    while_sampling: bool = field(False, "For callable and verifier: score finished responses a few at a time while others are "
                                 "still sampled. The function must judge each response independently.", None, _SOURCE)
    retries: int = field(2, "Retries after a failed call.", at_least(0), _SOURCE)
    timeout_s: float = field(60.0, "Seconds after which a call counts as failed.", above(0), _SOURCE)
    backoff_s: float = field(1.0, "Seconds before the first retry; doubled before each later one.", at_least(0), _SOURCE)
    max_dropped_share: float = field(0.5, "Stop with an error if a larger fraction of a batch has no score.", between(0.0, 1.0),
                                     (_IN_SUMS, unless("weights", (), "to one weight"), unless("length_coef", 0.0, "above 0")))

    def check(self, config: WholeConfig, name: str) -> None:
        """Checks the requirements of each part of the reward."""
        if "ppo" not in config.stages:
            return
        records = reward_records(self.source)
        parts = [record.name for record in records]
        if self.weights and len(self.weights) != len(parts):
            raise UserError(f"config.reward.weights has {len(self.weights)} entries; config.reward.source {self.source!r} has "
                            f"{len(parts)}: give one weight each, or none")
        if self.weights and not (any(self.weights) or self.length_coef or config.ppo.overlong_buffer):
            raise UserError(f"config.reward.weights is {self.weights}, so no part of the reward would count: set one weight to "
                            "another number, or config.reward.length_coef")
        for record in records:
            self._check_data(record, config)
        if "model" in parts and not self.model:
            raise UserError(f"config.reward.model is empty but config.reward.source is {self.source!r}; set it to the "
                            "model's folder")
        place, _, function = self.callable.rpartition(":")
        if "callable" in parts and not (place and function):
            raise UserError(f"config.reward.callable is {self.callable!r}; with config.reward.source 'callable' set it to "
                            "'package.module:function' or 'FILE.py:function'")
        if "verifier" in parts and self.verifier == "regex_match" and not data_source(config).patterns:
            raise UserError(f"config.reward.verifier is 'regex_match', which reads a column of patterns; {config.data.source} "
                            "has answers: use 'number_match' or 'exact_match'")
        own_judge = not judge_record(config.feedback.judge, "config.feedback.judge").runs_base
        if "ai_feedback" in parts and config.model.source == "scratch" and not (config.world.ratings or own_judge):
            raise UserError("config.reward.source is 'ai_feedback' but config.world.ratings is 0, so the base model never "
                            "sees a rating: set world.ratings above 0, for example to 0.1")

    def _check_data(self, record: RewardSource, config: WholeConfig) -> None:
        """Checks that the data source has the rows and columns that a part of the reward reads."""
        for need in record.needs:
            able = [source.name for source in DATA_SOURCES if _has(source, need)]
            if not (_has(data_source(config), need) or _made(config, need)):
                raise UserError(f"config.reward.source is {self.source!r}; with config.data.source {config.data.source!r} "
                                f"{_MISSING.get(need, f'there are no {need}')}: set data.source to {' or '.join(able)}, or "
                                f"{'add compare and preference to config.stages, or ' if need == 'comparisons' else ''}"
                                "choose another reward")
            if need == "answers":
                _check_answers(config)


def _check_answers(config: WholeConfig) -> None:
    """Checks that prompts from files have the answers that a verifier reads."""
    data = config.data
    if not (data.red_team or data.helpful):
        return
    if not (data.rl or data.train):
        raise UserError("config.reward.source has 'verifier', which reads the expected answers of the prompts, but "
                        "config.data.rl is empty; set it to a file with answers")
    if "evaluate" in config.stages and not data.eval:
        raise UserError("config.reward.source has 'verifier', which also evaluates the answers, but the prompts held out from "
                        "config.data.red_team and helpful have no expected answers; set config.data.eval to a file that has "
                        "them")


def _made(config: WholeConfig, need: str) -> bool:
    """Whether the run meets a requirement without its data source: with its own comparisons, or a judge other than a base
    that the run pretrains."""
    if need == "feedback":
        return config.model.source != "scratch" or not judge_record(config.feedback.judge, "config.feedback.judge").runs_base
    return need in made_before(config.stages, "ppo")


def _has(source: DataSourceRecord, need: str) -> bool:
    return need in source.provides or getattr(source, need, None) is True
