"""Alerts on the metrics of training: which signs of trouble the rows of a metric file show, and what to do about each.

An alert is a warning about any training stage. It changes nothing in the run, unlike an alarm of RL (`tracking/alarms.py`),
which measures held-out prompts and can end RL. `Alerts` reads the rows one at a time, in constant memory. The run, the report
and `jaxalign.watch` therefore derive the same alerts from the same rows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxalign.reasons import MOSTLY

WINDOW = 10
"""The rows that are averaged; a mean at the start or at the end of a stage is one over so many rows."""

_BEFORE = 20  # The rows before the last `_SHORT`, to which a sudden growth is compared.
_SHORT = 5
_SKIPS, _SKIP_ROWS = 3, 20  # Rows with a skipped update, of so many rows.
_KL_GROWTH, _KL_LEAST, _KL_PER_TOKEN = 4.0, 10.0, 1.0
_LENGTH_RATIO = 2.0
_ENTROPY_SHARE, _ENTROPY_MOST = 0.1, 0.1
_LEAST_EFFECTIVE = 0.3
_FEW_ROWS = 3  # Rows that show that training learns nothing, or something else than the reward.
_EQUAL = 1e-6  # The largest standard deviation of equal scores, over their size or 1: float32 means are rounded.
_NOISES = 2.0  # Standard deviations of one row; the means of `WINDOW` rows differ by 4.5 standard errors then.
_LOSS_RATIO, _LOSS_RISE = 1.5, 1.0  # Limits of a steady rise: a factor, and an absolute one for losses near 0.
_LOSS_NOISES = 3.0  # As `_NOISES`; the means of `_FEW_ROWS` and of `WINDOW` rows differ by 4.5 standard errors then.
_LEAP_RATIO, _LEAP_RISE = 10.0, 5.0  # Limits of a leap, wide enough for the noise of the first row alone.
_STALL_SECONDS, _STALL_STEPS = 120.0, 10.0

SCORE, KL, LENGTH = ("score",), ("kl_full", "kl_k3", "kl"), ("response_length", "length")
"""The metrics with the reward, the KL to the reference and the length of answers, by which the stages name them."""

_OF_UPDATES = ("policy_loss", "value_loss", "entropy")
"""Metrics of RL that are means over the responses with a weight in the update, whose number is "kept"."""
_LOSS = ("loss",)
_OF_RL = (*SCORE, *KL, "reward", "policy_loss", "value_loss")  # Metrics of stages whose loss need not fall.
_FINITE = ("loss", "policy_loss", "value_loss", "score", "reward", "kl_k1", "kl_k3", "kl_full", "kl", "entropy", "margin")


@dataclasses.dataclass(frozen=True)
class Alert:
    """A sign of trouble.

    Attributes:
      name: its name, such as "kl"; unique within a stage.
      step: the step of the row that shows it, from 0; None for a stall.
      sentence: what was measured, without a full stop.
      remedy: what to do, without a full stop.
    """

    name: str
    step: int | None
    sentence: str
    remedy: str

    def text(self) -> str:
        """The alert in two sentences."""
        return f"{self.sentence[:1].upper()}{self.sentence[1:]}. {self.remedy[:1].upper()}{self.remedy[1:]}."


class Alerts:
    """The alerts of one stage. Each occurs at most once."""

    def __init__(self) -> None:
        self.raised: list[Alert] = []
        self._first: list[Mapping[str, Any]] = []
        self._last: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=_BEFORE + _SHORT)
        self._score = _Score()
        self._loss_noise = _Noise()

    def update(self, row: Mapping[str, Any]) -> list[Alert]:
        """Reads the next row, and returns the alerts that it raises for the first time."""
        if len(self._first) < WINDOW:
            self._first.append(row)
        self._last.append(row)
        self._score.update(_value(row, SCORE))
        self._loss_noise.update(_value(row, _LOSS))
        known = {alert.name for alert in self.raised}
        new = [alert for name, check in _CHECKS.items() if name not in known and (alert := check(self, row)) is not None]
        self.raised += new
        return new

    def start(self, names: tuple[str, ...], count: int = WINDOW) -> float | None:
        """The mean of a metric over the first `count` rows, at most `WINDOW`; None with fewer rows."""
        return _mean(self._first[:count], names, count)

    def last(self, names: tuple[str, ...], count: int = WINDOW) -> float | None:
        """The mean of a metric over the last `count` rows; None with fewer rows."""
        return _mean(list(self._last)[-count:], names, count)

    def before(self, names: tuple[str, ...]) -> float | None:
        """The mean of a metric over the `_BEFORE` rows before the last `_SHORT`."""
        return _mean(list(self._last)[:-_SHORT], names, _BEFORE)


class _Noise:
    """The noise of a metric around its trend."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._squares, self._count = 0.0, 0

    def update(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        if self._before is not None:  # Differences of neighbours, because a trend does not add to them.
            self._squares, self._count = self._squares + (value - self._before) ** 2, self._count + 1
        self._before = value

    @property
    def deviation(self) -> float:
        """The standard deviation of the metric of one row around its trend."""
        return math.sqrt(self._squares / (2 * self._count)) if self._count else math.inf


class _Score:
    """The mean score of the first, the best and the last `WINDOW` rows, and the noise of one row."""

    def __init__(self) -> None:
        self._last: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self.first = self.best = self.mean = math.nan
        self._noise = _Noise()

    def update(self, score: float | None) -> None:
        if score is None or not math.isfinite(score):
            return
        self._noise.update(score)
        self._last.append(score)
        if len(self._last) == WINDOW:
            self.mean = statistics.fmean(self._last)
            self.first = self.mean if math.isnan(self.first) else self.first
            self.best = self.mean if math.isnan(self.best) else max(self.best, self.mean)

    @property
    def noise(self) -> float:
        """The standard deviation of the score of one row around its trend."""
        return self._noise.deviation


def alerts_of(rows: Iterable[Mapping[str, Any]]) -> list[Alert]:
    """The alerts that the rows of a stage's metric file raise, in order."""
    alerts = Alerts()
    for row in rows:
        alerts.update(row)
    return alerts.raised


def stall_limit(step_seconds: float | None) -> float:
    """The seconds without a finished step after which a stage counts as stalled. step_seconds: the median time of a step."""
    return max(_STALL_SECONDS, _STALL_STEPS * (step_seconds or 0.0))


def stalled(idle: float, step_seconds: float | None) -> Alert | None:
    """The alert on a process that is alive but has not finished a step for `idle` seconds; None below `stall_limit`."""
    if idle <= stall_limit(step_seconds):
        return None
    usual = "" if step_seconds is None else f", and the median step takes {step_seconds:.3g} s"
    return Alert("stall", None, f"no step has ended for {idle:,.0f} s{usual}",
                 "look at the log for a judge or server that does not answer, a process of the run that ended, a full disk or "
                 "a long compilation; if the process hangs, end it and run the same command again to resume")


def _value(row: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    return next((row[name] for name in names if isinstance(row.get(name), (int, float))), None)


def _mean(rows: Iterable[Mapping[str, Any]], names: tuple[str, ...], count: int) -> float | None:
    values = [value for row in rows if (value := _value(row, names)) is not None and math.isfinite(value)]
    return statistics.fmean(values) if len(values) >= count else None


def _not_finite(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    if row.get("overflowed"):  # The loss scale explains it, and falls.
        return None
    if math.isnan(row.get("response_length", 0)):  # No response has a score, so there are none to take a mean over.
        return None
    names = [name for name in _FINITE if not (name in _OF_UPDATES and row.get("kept") == 0)]
    wrong = [name for name in names if isinstance(row.get(name), float) and not math.isfinite(row[name])]
    if not wrong:
        return None
    return Alert("not_finite", row["step"], f"{wrong[0]} is {row[wrong[0]]} at step {row['step']:,}",
                 "stop the run, resume from the last checkpoint with a lower optimizer.learning_rate or more warmup_steps, and "
                 "check the rows of this step")


def _loss(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    if _value(row, _OF_RL) is not None:
        return None
    remedy = "training diverges: lower optimizer.learning_rate of this stage, or raise its warmup_steps"
    first, few = alerts.start(_LOSS, 1), alerts.last(_LOSS, _FEW_ROWS)
    if first is not None and few is not None and few - first > max(_LEAP_RISE, (_LEAP_RATIO - 1) * abs(first)):
        return Alert("loss", row["step"], f"the mean loss of {_FEW_ROWS} steps rose to {few:.4g}, from {first:.4g} at the "
                     "first step", remedy)
    start, now = alerts.start(_LOSS, _FEW_ROWS), alerts.last(_LOSS)
    if start is None or now is None:
        return None
    if now - start > max(_LOSS_RISE, (_LOSS_RATIO - 1) * abs(start), _LOSS_NOISES * alerts._loss_noise.deviation):
        return Alert("loss", row["step"], f"the mean loss of {WINDOW} steps rose to {now:.4g}, from {start:.4g} in the first "
                     f"{_FEW_ROWS}", remedy)
    return None


def _skipped(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    rows = list(alerts._last)[-_SKIP_ROWS:]
    count = sum(float(one.get("skipped") or 0) > float(one.get("overflowed") or 0) for one in rows)
    if count < _SKIPS:
        return None
    return Alert("skipped", row["step"], f"{count} of the last {len(rows)} steps skipped an update because its gradient was "
                 "not finite", "lower optimizer.learning_rate, and check the data for the cause")


def _kl(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    now, before, length = alerts.last(KL, _SHORT), alerts.before(KL), alerts.last(LENGTH, _SHORT)
    if now is None or now < _KL_LEAST:
        return None
    remedy = ("raise the weight of the KL (ppo.kl_coef), set ppo.target_kl, or lower the learning rate; read samples before "
              "you trust the reward")
    if before is not None and now > _KL_GROWTH * before:
        return Alert("kl", row["step"], f"the KL to the reference rose to {now:.3g} nats per response, from {before:.3g} in "
                     f"the {_BEFORE} steps before", remedy)
    if length and now > _KL_PER_TOKEN * length:
        return Alert("kl", row["step"], f"the KL to the reference is {now:.3g} nats per response, more than one nat per token",
                     remedy)
    return None


def _reward(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    score = alerts._score
    drop, rise = score.best - score.mean, score.best - score.first
    if not (drop > _NOISES * score.noise and drop >= rise / 2):
        return None
    return Alert("reward", row["step"], f"the mean score of {WINDOW} steps fell to {score.mean:.3g} from {score.best:.3g} at "
                 f"its best (from {score.first:.3g} at the start)",
                 "lower the learning rate or the number of epochs, or return to the last good checkpoint; ppo.alarms with "
                 "action=best keeps the best measured policy")


def _length(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    start, now = alerts.start(LENGTH), alerts.last(LENGTH)
    if not start or now is None or start / _LENGTH_RATIO <= now <= start * _LENGTH_RATIO:
        return None
    cause = ("the reward may prefer long answers: subtract a cost of length from it (docs/rewards.md), and read samples"
             if now > start else "the reward may prefer short answers or refusals: read samples, and add a penalty for them")
    return Alert("length", row["step"], f"answers have {now:,.0f} tokens on average, {start:,.0f} at the start", cause)


def _entropy(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    start, now = alerts.start(("entropy",)), alerts.last(("entropy",))
    if start is None or now is None or now > min(_ENTROPY_SHARE * start, _ENTROPY_MOST):
        return None
    return Alert("entropy", row["step"], f"the entropy of the policy fell to {now:.2g} nats per token, from {start:.2g} at the "
                 "start", "the policy hardly explores any more: add an entropy bonus (ppo.entropy_coef), raise ppo.kl_coef or "
                 "the temperature, or lower the learning rate")


def _effective(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    now = alerts.last(("effective_sample_share",))
    if now is None or now >= _LEAST_EFFECTIVE:
        return None
    return Alert("effective_samples", row["step"], f"the importance weights leave {now:.0%} of the samples effective",
                 "the sampler differs too much from the trainer: update its weights more often, use its precision in training, "
                 "or lower the number of epochs and the learning rate")


def _score_changed(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    now = alerts.last(("score_changed",), _FEW_ROWS)
    if now is None or now <= MOSTLY:
        return None
    return Alert("score_changed", row["step"], f"{now:.0%} of the responses of {_FEW_ROWS} iterations have no stop "
                 "token, and ppo.missing_eos changed their scores, so the reward hardly counts",
                 "raise ppo.max_new_tokens, start from a model that ends its answers, or set ppo.missing_eos to none, which "
                 "keeps these scores")


def _constant_score(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    rows = list(alerts._last)[-_FEW_ROWS:]
    spreads = [one["score_std"] / max(1.0, abs(one["score"])) for one in rows if {"score", "score_std"} <= one.keys()]
    if len(spreads) < _FEW_ROWS or not all(spread <= _EQUAL for spread in spreads):
        return None
    return Alert("constant_score", row["step"], f"all responses of {_FEW_ROWS} iterations have the same score, "
                 f"{row['score']:.4g}, so the reward teaches nothing",
                 "read the samples, and check the reward on a good and on a bad response; for a verifier, check that the "
                 "prompts have the columns that it reads")


def _no_gradient(alerts: Alerts, row: Mapping[str, Any]) -> Alert | None:
    rows = list(alerts._last)[-_FEW_ROWS:]
    if len(rows) < _FEW_ROWS or any(one.get("grad_norm") != 0 for one in rows):
        return None
    return Alert("no_gradient", row["step"], f"the gradient of {_FEW_ROWS} steps in a row is 0, so nothing is learnt",
                 "look at the scores in RL: if all responses to a prompt have the same score, an estimator that compares them "
                 "(such as grpo) gives no gradient; in other stages, look for rows without a token to learn")


_CHECKS: dict[str, Callable[[Alerts, Mapping[str, Any]], Alert | None]] = {
    "not_finite": _not_finite, "loss": _loss, "skipped": _skipped, "kl": _kl, "reward": _reward, "length": _length,
    "entropy": _entropy, "effective_samples": _effective, "score_changed": _score_changed, "constant_score": _constant_score,
    "no_gradient": _no_gradient,
}
