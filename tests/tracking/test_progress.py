"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from jaxalign.tracking.progress import Progress, noted


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class _Terminal(io.StringIO):
    def isatty(self):
        return True


class _Unready:
    """A value that must not be read."""

    def item(self):
        raise AssertionError("the device was waited for although nothing was printed")


def test_plain_lines_are_printed_every_five_seconds_with_speed_and_time_left():
    stream, clock = io.StringIO(), _Clock()
    with Progress("sft", total=20, stream=stream, clock=clock) as progress:
        for step in range(20):
            clock.now += 1.0
            progress.update(tokens=1500, loss=2.0 - step / 10)
    assert stream.getvalue().splitlines() == [
        "[sft] step 5/20 (25%), loss 1.6, 1,500 tokens/s, 0:15 left",
        "[sft] step 10/20 (50%), loss 1.1, 1,500 tokens/s, 0:10 left",
        "[sft] step 15/20 (75%), loss 0.6, 1,500 tokens/s, 0:05 left",
        "[sft] step 20/20 (100%), loss 0.1, 1,500 tokens/s, 0:00 left",
        "[sft] finished 20/20 steps, loss 0.1, took 0:20"]


def test_a_note_follows_the_values_of_each_line():
    stream, clock, spent = io.StringIO(), _Clock(), iter(["", "0.50 spent", "1.37 spent"])
    with noted(lambda: next(spent)), Progress("revise", total=20, unit="prompt", stream=stream, clock=clock) as progress:
        for _ in range(2):
            clock.now += 5.0
            progress.update(10, loss=2.0)
    assert stream.getvalue().splitlines() == [
        "[revise] prompt 10/20 (50%), loss 2, 0:05 left",
        "[revise] prompt 20/20 (100%), loss 2, 0.50 spent, 0:00 left",
        "[revise] finished 20/20 prompts, loss 2, 1.37 spent, took 0:10"]
    with Progress("sft", total=1, stream=stream, clock=clock):
        pass
    assert "spent" not in stream.getvalue().splitlines()[-1]


def test_speed_is_taken_over_the_last_half_minute():
    stream, clock = io.StringIO(), _Clock()
    with Progress("ppo", total=1000, stream=stream, clock=clock) as progress:
        clock.now += 300.0  # compiling
        progress.update(tokens=10)
        for _ in range(40):
            clock.now += 1.0
            progress.update(tokens=200)
    assert "200 tokens/s, 15:59 left" in stream.getvalue()  # 1000 - 41 steps at one per second


def test_resumed_stage_continues_the_count_and_says_so():
    stream, clock = io.StringIO(), _Clock()
    with Progress("pretrain", total=420, start=120, stream=stream, clock=clock) as progress:
        clock.now += 10.0
        progress.update(20)
    assert stream.getvalue().splitlines() == [
        "[pretrain] continues at step 120 of 420",
        "[pretrain] step 140/420 (33%), 2:20 left",
        "[pretrain] stopped at 140/420 steps, took 0:10"]


def test_values_are_not_waited_for_between_lines():
    """A value that is not printed is never converted to a number: on an accelerator that would stall the queue of steps."""
    stream = io.StringIO()
    with Progress("ppo", total=3, stream=stream, clock=_Clock()) as progress:
        progress.update(reward=_Unready())
        progress.update(reward=0.5)
    assert stream.getvalue().endswith("[ppo] stopped at 2/3 steps, reward 0.5, took 0:00\n")


def test_texts_are_counted_before_the_first_unit_is_complete():
    """A queue of many prompts completes all of them at its end."""
    stream, clock = io.StringIO(), _Clock()
    with Progress("revise", total=1280, unit="prompt", stream=stream, clock=clock) as progress:
        for _ in range(2):
            clock.now += 6.0
            progress.update(0, tokens=1200, texts=150)
        progress.update(512)
    assert stream.getvalue().splitlines() == [
        "[revise] prompt 0/1,280 (0%), 150 texts, 200 tokens/s",
        "[revise] prompt 0/1,280 (0%), 300 texts, 200 tokens/s",
        "[revise] stopped at 512/1,280 prompts, 300 texts, took 0:12",
    ]


def test_failure_prints_where_it_stopped_without_touching_values():
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Progress("ppo", total=3, stream=stream, clock=_Clock()) as progress:
        progress.update(reward=_Unready())
        raise KeyboardInterrupt
    assert stream.getvalue() == "[ppo] stopped at 1/3 steps, took 0:00\n"


def test_terminal_gets_a_bar_with_step_value_speed_and_time_left():
    stream, clock = _Terminal(), _Clock()
    with Progress("compare", total=10, unit="pair", stream=stream, clock=clock) as progress:
        clock.now += 2.0
        progress.update(5, tokens=400, confidence=0.875)
    text = stream.getvalue()
    assert "[compare]  50%|" in text
    assert "5/10 pairs, confidence 0.875, 200 tokens/s, 0:02 left" in text
    assert text.endswith("\n")


def test_stage_without_steps_is_no_error():
    stream = io.StringIO()
    with Progress("revise", total=0, stream=stream, clock=_Clock()):
        pass
    assert stream.getvalue() == "[revise] finished 0/0 steps, took 0:00\n"
