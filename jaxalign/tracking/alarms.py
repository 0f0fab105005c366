"""The alarms of RL (`config.ppo.alarms`): which limits measurements cross, which alarms fire, and how a report states it.

A row of the metric file has the measurement after its iteration under "alarm/NAME"; row 0 also has that of the policy before
RL, under "alarm/start_NAME". All functions are pure, so a resumed run and the report derive the same alarms from the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxalign.config import AlarmsConfig
from jaxalign.tracking.formatting import number, short_percent

PREFIX, START = "alarm/", "alarm/start_"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measures of one policy on the held-out helpful prompts.

    Attributes:
      iteration: the number of iterations of RL that the policy has had; 0 is the policy before RL.
      values: by name: "score" (mean, in the reward's units), "repetition" (mean share of repeated 4-grams), "length" (mean
        tokens), "unfinished" and "refused" (shares of answers), and "win_rate" if a judge is asked.
    """

    iteration: int
    values: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """The fields of the metric file."""
        return {(PREFIX if self.iteration else START) + name: value for name, value in self.values.items()}


@dataclasses.dataclass(frozen=True)
class Fired:
    """An alarm that fired.

    Attributes:
      alarm: its name in `ALARMS`.
      since: the iteration of the first of the consecutive measurements that cross the limit.
      iteration: the iteration of the measurement at which it fired.
      value: the measure at iteration `since`.
      start: the measure before RL; None for the win rate.
      limit: the value that may not be crossed.
    """

    alarm: str
    since: int
    iteration: int
    value: float
    start: float | None
    limit: float

    def sentence(self) -> str:
        """The alarm in words."""
        kind = ALARMS[self.alarm]
        shown = short_percent if kind.share else number
        before = "" if self.start is None else f"; at the start {shown(self.start)}"
        return f"From iteration {self.since:,}, {kind.phrase.format(shown(self.value))}{before} (limit {shown(self.limit)})."


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The alarms that fired, in order, and the iteration of the best measured policy before the first of them."""

    fired: tuple[Fired, ...]
    best: int


@dataclasses.dataclass(frozen=True)
class _Alarm:
    """An alarm: the measure that it reads, its phrase with the value as {}, whether the value is a share, and whether the alarm
    fires below its limit."""

    measure: str
    phrase: str
    share: bool = True
    below: bool = False


ALARMS = {
    "score": _Alarm("score", "the mean score of answers to harmless prompts was {}", share=False, below=True),
    "win_rate": _Alarm("win_rate", "the win rate against the answers of the policy before RL was {}", below=True),
    "repetition": _Alarm("repetition", "on average {} of the 4-grams in an answer to a harmless prompt were repetitions"),
    "short": _Alarm("length", "the mean length of answers to harmless prompts was {} tokens", share=False, below=True),
    "long": _Alarm("length", "the mean length of answers to harmless prompts was {} tokens", share=False),
    "unfinished": _Alarm("unfinished", "{} of the answers to harmless prompts did not end"),
    "refused": _Alarm("refused", "{} of the harmless prompts were refused"),
}


def limits(section: AlarmsConfig, start: Mapping[str, float]) -> dict[str, float]:
    """The limit of each alarm that is on. start: the measures of the policy before RL."""
    by_name = {
        "score": None if section.score_drop is None else start["score"] - section.score_drop,
        "win_rate": section.min_win_rate if section.judge else None,
        "repetition": None if section.repetition_rise is None else start["repetition"] + section.repetition_rise,
        "short": None if section.min_length_ratio is None else start["length"] * section.min_length_ratio,
        "long": None if section.max_length_ratio is None else start["length"] * section.max_length_ratio,
        "unfinished": None if section.unfinished_rise is None else start["unfinished"] + section.unfinished_rise,
        "refused": None if section.refusal_rise is None else start["refused"] + section.refusal_rise,
    }
    return {name: limit for name, limit in by_name.items() if limit is not None}


def crossed(section: AlarmsConfig, start: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """The alarms whose limit a measurement crosses, with their limits. A value that is NaN crosses none."""
    over = {}
    for name, limit in limits(section, start).items():
        value = values.get(ALARMS[name].measure, math.nan)
        if value < limit if ALARMS[name].below else value > limit:
            over[name] = limit
    return over


def outcome(section: AlarmsConfig, measurements: Sequence[Measurement]) -> Outcome:
    """The alarms of a run. Each alarm fires at most once.

    The best policy is the one with the highest mean score among the measurements before the first alarm that cross no limit;
    of equal scores the earliest. The policy before RL is always one of them.

    Args:
      section: `config.ppo.alarms`.
      measurements: in order of their iterations; the first is that of the policy before RL.
    """
    first, best = measurements[0], measurements[0]
    since: dict[str, list[Measurement]] = {}
    fired: dict[str, Fired] = {}
    for measured in measurements[1:]:
        over = crossed(section, first.values, measured.values)
        since = {name: [*since.get(name, ()), measured] for name in over}
        for name, limit in over.items():
            if len(since[name]) >= section.patience and name not in fired:
                measure, begin = ALARMS[name].measure, since[name][0]
                fired[name] = Fired(name, begin.iteration, measured.iteration, begin.values[measure],
                                    first.values.get(measure), limit)
        score, best_score = measured.values["score"], best.values["score"]
        if not over and not fired and (score > best_score or math.isnan(best_score) and not math.isnan(score)):
            best = measured
    return Outcome(tuple(fired.values()), best.iteration)


def read_measurements(rows: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """The measurements in the rows of a metric file, that of the policy before RL first; empty if there are none."""
    measurements = []
    for row in rows:
        start = {name.removeprefix(START): value for name, value in row.items() if name.startswith(START)}
        values = {name.removeprefix(PREFIX): value for name, value in row.items()
                  if name.startswith(PREFIX) and not name.startswith(START)}
        measurements += [Measurement(0, start)] if start else []
        measurements += [Measurement(row["step"] + 1, values)] if values else []
    return measurements
