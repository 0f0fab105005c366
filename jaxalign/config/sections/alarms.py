"""The alarms of RL: limits on how far answers to helpful prompts may degrade."""

from __future__ import annotations

import dataclasses
import re

from jaxalign.config.base import Section, WholeConfig
from jaxalign.config.constraints import above, at_least, between, one_of
from jaxalign.config.reading import unless, when
from jaxalign.config.schema import field
from jaxalign.errors import UserError

_ON = unless("every", 0, "above 0")


@dataclasses.dataclass(frozen=True)
class AlarmsConfig(Section):
    """Answers to held-out helpful prompts are measured during RL and compared with those of the policy before RL.

    A limit of None switches its alarm off. Shares and rises are fractions: 0.1 is 10 percentage points.
    """

    every: int = field(0, "Iterations between measurements on held-out helpful prompts; the last iteration is measured as "
                       "well. 0: none.", at_least(0))
    prompts: int = field(64, "Number of held-out helpful prompts, which RL then does not train on; at most half of the helpful "
                         "prompts.", at_least(1), _ON)
    temperature: float = field(0.0, "Sampling temperature of the measured answers; 0 is greedy.", at_least(0), _ON)
    action: str = field("warn", "What happens when an alarm fires: warn, stop (save a checkpoint and end the run with an "
                        "error) or best (end RL; the result is the measured policy with the highest mean score before the "
                        "alarm and without a crossed limit).", one_of("warn", "stop", "best"), _ON)
    patience: int = field(2, "Consecutive measurements that must cross a limit before its alarm fires.", at_least(1), _ON)
    judge: bool = field(False, "Whether the judge of config.feedback compares the answers with those of the policy before RL.",
                        None, _ON)
    score_drop: float | None = field(0.5, "Largest fall of the mean score of the reward, in its units; None: no limit.",
                                     above(0), _ON)
    min_win_rate: float | None = field(0.35, "Lowest win rate against the policy before RL; None: no limit.",
                                       between(0.0, 1.0), _ON, when("judge", True))
    repetition_rise: float | None = field(0.15, "Largest rise of the mean share of repeated 4-grams of tokens in an answer; "
                                          "None: no limit.", between(0.0, 1.0), _ON)
    min_length_ratio: float | None = field(0.5, "Lowest ratio of the mean length to that of the policy before RL; None: no "
                                           "limit.", between(0.0, 1.0), _ON)
    max_length_ratio: float | None = field(2.0, "Highest ratio of the mean length to that of the policy before RL; None: no "
                                           "limit.", at_least(1.0), _ON)
    unfinished_rise: float | None = field(0.2, "Largest rise of the share of answers that did not end; None: no limit.",
                                          between(0.0, 1.0), _ON)
    refusal_rise: float | None = field(0.1, "Largest rise of the share of answers that refuse; None: no limit.",
                                       between(0.0, 1.0), _ON)
    refusals: tuple[str, ...] = field((), "Regular expressions that match the beginning of a refusal, in any case; empty: the "
                                      "English patterns of docs/ppo.md.", None, _ON)

    def check(self, config: WholeConfig, name: str) -> None:
        for pattern in self.refusals:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"config.{name}.refusals has {pattern!r}, which is not a regular expression ({error}); correct "
                                "it") from None
