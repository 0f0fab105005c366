"""Work beside training: its share of the time, and that a failure ends only itself."""

from __future__ import annotations

import logging
import time

from jaxalign.pipeline import companions
from jaxalign.pipeline.companions import Repeating


def wait_until(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_a_slow_action_is_repeated_less_often_than_its_interval_says(monkeypatch):
    monkeypatch.setattr(companions, "_FIRST_SECONDS", 0.0)
    calls = []

    def action():
        calls.append(time.monotonic())
        time.sleep(0.02)  # So at most one call in two seconds.

    with Repeating("the action", 0.01, action) as repeating:
        wait_until(lambda: calls)
        repeating.soon()
        time.sleep(0.5)
    assert len(calls) == 1 and repeating.ended


def test_soon_ends_the_interval(monkeypatch):
    monkeypatch.setattr(companions, "MOST_SHARE", 1e9)
    calls = []
    with Repeating("the action", 3600.0, lambda: calls.append(1)) as repeating:
        repeating.soon()
        wait_until(lambda: calls)
    assert len(calls) == 1


def test_an_action_that_fails_is_reported_once_and_called_no_more(monkeypatch, caplog):
    monkeypatch.setattr(companions, "MOST_SHARE", 1e9)
    with caplog.at_level(logging.WARNING, "jaxalign"), Repeating("the live report", 0.01, lambda: 1 / 0) as repeating:
        wait_until(lambda: repeating.ended)
    assert caplog.messages == ["the live report stops (ZeroDivisionError: division by zero); the run goes on without it"]
