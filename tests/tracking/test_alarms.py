"""Which alarms fire, when, and which policy is the best, on measurements written by hand."""

from __future__ import annotations

import math

import pytest

from jaxalign.config import AlarmsConfig
from jaxalign.tracking.alarms import Measurement, crossed, outcome, read_measurements

START = {"score": 0.0, "repetition": 0.1, "length": 40.0, "unfinished": 0.0, "refused": 0.01}


def run(*changes):
    """Measurements at iterations 0, 10, 20, ...: the start, then the start with each of the changes."""
    return [Measurement(10 * i, START | change) for i, change in enumerate(({}, *changes))]


@pytest.mark.parametrize(
    ("change", "alarms"),
    [
        ({}, set()),
        ({"score": -0.5, "repetition": 0.25, "length": 20.0, "unfinished": 0.2}, set()),  # on the limits
        ({"score": -0.51}, {"score"}),
        ({"repetition": 0.26}, {"repetition"}),
        ({"length": 19.9}, {"short"}),
        ({"length": 80.1}, {"long"}),
        ({"unfinished": 0.21}, {"unfinished"}),
        ({"refused": 0.12}, {"refused"}),
        ({"score": math.nan}, set()),
        ({"win_rate": 0.1}, set()),  # no judge is asked
    ],
)
def test_the_limits_are_relative_to_the_start(change, alarms):
    assert crossed(AlarmsConfig(every=10), START, START | change).keys() == alarms


def test_the_win_rate_has_a_limit_with_a_judge_and_none_switches_a_limit_off():
    assert crossed(AlarmsConfig(every=10, judge=True), START, START | {"win_rate": 0.34}) == {"win_rate": 0.35}
    assert crossed(AlarmsConfig(every=10, refusal_rise=None), START, START | {"refused": 1.0}) == {}


def test_an_alarm_fires_after_consecutive_crossings_and_once():
    refusing = {"refused": 0.12}
    section = AlarmsConfig(every=10, patience=2)
    assert outcome(section, run(refusing, {}, refusing)).fired == ()
    (fired,) = outcome(section, run({}, {}, {}, refusing, refusing, refusing)).fired
    assert (fired.alarm, fired.since, fired.iteration, fired.value, fired.start) == ("refused", 40, 50, 0.12, 0.01)
    assert fired.sentence().startswith("From iteration 40, 12% of the harmless prompts were refused; at the start 1%")


def test_the_best_policy_has_the_highest_score_without_a_crossing_before_the_alarm():
    section, short = AlarmsConfig(every=10, patience=2), {"length": 10.0}
    scores = [{"score": 1.0}, {"score": 0.5}, {"score": 3.0} | short, {"score": 4.0} | short, {"score": 5.0}]
    assert outcome(section, run(*scores)).best == 10
    assert outcome(section, run(short, short)).best == 0
    assert outcome(section, run({"score": math.nan}, {"score": -0.1})).best == 0


def test_measurements_are_read_from_the_metric_file():
    rows = [{"step": 0, "loss": 1.0, "alarm/start_score": 0.5}, {"step": 1, "loss": 1.0}, {"step": 2, "alarm/score": 0.7}]
    assert read_measurements(rows) == [Measurement(0, {"score": 0.5}), Measurement(3, {"score": 0.7})]
