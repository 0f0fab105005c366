"""Reward callables: every way in which one can fail."""

from __future__ import annotations

import math
import re
import sys
import threading
import time

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rewards.callables import RewardReport, call_reward

PROMPTS, RESPONSES = ["p", "q", "r"], ["one", "two", "three"]


def _call(fn, **settings):
    return call_reward(fn, PROMPTS, RESPONSES, **{"backoff_s": 0.0, **settings})


def test_scores_are_unchanged_and_the_callable_gets_the_columns():
    def reward(prompts, responses, *, level, **columns):
        assert columns == {"note": ["a", "b", "c"]}
        return [x + len(r) / 8 + (p == "p") for p, r, x in zip(prompts, responses, level, strict=True)]

    scores, kept, report = _call(reward, columns={"level": [0.5, 0.25, 0], "note": ["a", "b", "c"]})
    np.testing.assert_array_equal(scores, np.float32([1.875, 0.625, 0.625]))
    assert scores.dtype == np.float32 and kept.dtype == bool and kept.all()
    assert report == RewardReport(first_error=None, cause=None)


@pytest.mark.parametrize("wrap", [list, tuple, np.asarray, lambda x: np.asarray(x, np.float16), lambda x: list(np.asarray(x))])
def test_lists_tuples_and_arrays_are_scores(wrap):
    scores, kept, _ = _call(lambda prompts, responses: wrap([1, 0, 2]))
    np.testing.assert_array_equal(scores, [1, 0, 2])
    assert kept.all()


# 0.73 stays 0.73, and a bool or an integer is converted to float.
def test_rewards_are_never_rounded():
    scores, _, _ = _call(lambda prompts, responses: [0.73, True, 3])
    np.testing.assert_array_equal(scores, np.float32([0.73, 1, 3]))


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, 1e39, "0.5", b"1", [1.0], 1j, object()])
def test_an_invalid_score_drops_its_row(bad):
    calls = []
    scores, kept, report = _call(lambda prompts, responses: calls.append(1) or [0.5, bad, 2.0])
    np.testing.assert_array_equal(scores, [0.5, 0, 2])
    np.testing.assert_array_equal(kept, [True, False, True])
    assert report.first_error.startswith("the score of row 1 is ") and len(calls) == 1


def test_an_entry_whose_repr_fails_drops_its_row():
    class Hostile:
        def __str__(self):
            raise RuntimeError

    _, kept, report = _call(lambda prompts, responses: [Hostile(), 1, 1])
    assert not kept[0] and "not printable (Hostile)" in report.first_error


def test_a_failing_callable_is_retried_and_recovers():
    calls = []

    def reward(prompts, responses):
        calls.append(list(responses))
        # Changes to its arguments do not persist to the next call.
        responses.clear()
        if len(calls) < 3:
            raise OSError(f"try {len(calls)}")
        return [1.0, 2.0, 3.0]

    scores, kept, report = _call(reward, retries=2)
    np.testing.assert_array_equal(scores, [1, 2, 3])
    assert kept.all() and calls == [RESPONSES] * 3
    assert re.search(r"reward raised OSError at .*\.py:\d+: try 1$", report.first_error)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_callable_that_always_fails_drops_the_batch(retries):
    calls = []

    def reward(prompts, responses):
        calls.append(1)
        raise ValueError("broken " * 100)

    scores, kept, report = _call(reward, retries=retries)
    np.testing.assert_array_equal(scores, np.zeros(3, np.float32))
    assert not kept.any() and len(calls) == 1 + retries
    assert re.search(r"reward raised ValueError at .*\.py:\d+: broken", report.first_error) and len(report.first_error) < 400


def test_the_report_has_the_exception_that_its_first_error_describes(monkeypatch):
    def reward(prompts, responses):
        raise ZeroDivisionError("first") if not calls.append(1) and len(calls) == 1 else OSError("second")

    calls = []
    assert str(_call(reward, retries=1)[2].cause) == "first"
    assert _call(lambda prompts, responses: [None, 1, 1])[2].cause is None
    monkeypatch.setenv("DB_PASSWORD", "hunter22-hunter22")
    report = _call(lambda prompts, responses: 1 / int("hunter22-hunter22"), retries=0)[2]
    assert "[DB_PASSWORD]" in report.first_error and report.cause is None  # A traceback would show the password.


def test_a_callable_that_exits_counts_as_a_failure():
    _, kept, report = _call(lambda prompts, responses: sys.exit(3), retries=0)
    assert not kept.any() and re.search(r"raised SystemExit at .*\.py:\d+: 3", report.first_error)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 responses"),
        ([1.0] * 4, "returned 4 scores for 3 responses"),
        (None, "returned None; a list of 3 numbers"),
        (1.0, "returned a value of type float"),
        ("abc", "returned a value of type str"),
        ({"a": 1, "b": 2, "c": 3}, "returned a value of type dict"),
        (np.zeros((3, 1)), r"returned an array of shape \(3, 1\)"),
        (np.float32(1), r"returned an array of shape \(\)"),
    ],
)
def test_a_result_of_another_form_drops_the_batch_with_a_reason(result, text):
    calls = []
    scores, kept, report = _call(lambda prompts, responses: calls.append(1) or result, retries=1)
    assert not kept.any() and not scores.any() and len(calls) == 2
    assert re.search(text, report.first_error)


def test_a_callable_that_does_not_return_is_abandoned():
    release = threading.Event()
    calls = []

    def reward(prompts, responses):
        calls.append(1)
        if len(calls) == 1:
            release.wait(30)
            return [9.0, 9.0, 9.0]
        return [1.0, 2.0, 3.0]

    start = time.perf_counter()
    scores, kept, report = _call(reward, timeout_s=0.1, retries=1)
    release.set()
    assert time.perf_counter() - start < 5
    np.testing.assert_array_equal(scores, [1, 2, 3])
    assert kept.all() and len(calls) == 2
    assert report.first_error.endswith("reward did not return within 0.1 s")


def test_a_callable_that_never_returns_drops_the_batch():
    release, calls = threading.Event(), []
    _, kept, report = _call(lambda prompts, responses: calls.append(1) or release.wait(30), timeout_s=0.05, retries=1)
    release.set()
    assert not kept.any() and len(calls) == 2 and report.first_error.endswith("did not return within 0.05 s")


def test_the_pause_doubles(monkeypatch):
    pauses = []
    monkeypatch.setattr("jaxalign.rewards.callables.time.sleep", pauses.append)
    _call(lambda prompts, responses: None, retries=3, backoff_s=0.5)
    assert pauses == [0.5, 1.0, 2.0]


def test_without_rows_the_callable_is_not_called():
    scores, kept, report = call_reward(lambda *_: 1 / 0, [], [])
    assert scores.shape == kept.shape == (0,) and report.first_error is None


async def _coroutine(prompts, responses):
    return [1.0] * len(responses)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "the reward is of type int; a callable"),
        ({"fn": _coroutine}, "_coroutine is a coroutine function"),
        ({"prompts": ["p"]}, "prompts has 1 entries but there are 3 responses"),
        ({"columns": {"answer": [1]}}, "answer has 1 entries but there are 3 responses"),
        ({"columns": {"responses": RESPONSES}}, "a column is called 'responses'"),
        ({"columns": {"level": [1, 2, 3]}, "fn": lambda prompts, responses: responses},
         r"<lambda> cannot be called with prompts, responses, level: got an unexpected .*'level'; define it as"),
        ({"fn": lambda texts: texts}, "cannot be called with prompts, responses: too many positional arguments"),
        ({"retries": -1}, "retries = -1"),
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"backoff_s": -0.5}, "backoff_s = -0.5"),
    ],
)
def test_wrong_use_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        call_reward(**{"fn": lambda *_: [1.0] * 3, "prompts": PROMPTS, "responses": RESPONSES, **arguments})


DETAILS = {"token_ids": [[1, 2, 9], [3], []], "ended": [True, False, False], "raw_responses": ["a b</s>", "c", ""]}


def test_a_callable_receives_the_details_that_it_names_and_scores_tokens():
    def reward(prompts, responses, token_ids, ended, raw_responses, **columns):
        assert (token_ids, ended, raw_responses, columns) == (*DETAILS.values(), {"own": [1, 2, 3]})
        return [[0.5, 1.0, -1.0], 2.0, []]

    scores, kept, _ = _call(reward, details=DETAILS, columns={"own": [1, 2, 3]})
    np.testing.assert_array_equal(scores, [[0.5, 1, -1], [2, 0, 0], [0, 0, 0]])
    assert kept.all()
    scores, _, _ = _call(lambda prompts, responses, **columns: [float(len(columns))] * 3, details=DETAILS)
    np.testing.assert_array_equal(scores, [0, 0, 0])
    scores, _, _ = _call(lambda prompts, responses, ended: ended, details=DETAILS, columns={"ended": [5.0, 6.0, 7.0]})
    np.testing.assert_array_equal(scores, [5, 6, 7])  # A column of the data comes first.


def test_scores_of_tokens_are_checked():
    _, kept, report = _call(lambda *_: [[1.0, float("nan"), 1.0], [1.0], []], details=DETAILS)
    assert kept.tolist() == [False, True, True] and "the score of row 0" in report.first_error
    _, kept, report = _call(lambda *_: [[1.0, 1.0], [1.0], []], details=DETAILS, retries=0)
    assert not kept.any() and "2 numbers for the 3 tokens of response 0" in report.first_error


def test_a_callable_cannot_change_what_others_see():
    columns, prompts = {"answer": [["a"], ["b"], ["c"]]}, [[{"role": "user", "content": "x"}] for _ in range(3)]

    def reward(prompts, responses, answer):
        answer[0].append("spoilt")
        prompts[0][0]["content"] = "spoilt"
        return [1.0] * 3

    call_reward(reward, prompts, RESPONSES, columns)
    assert columns == {"answer": [["a"], ["b"], ["c"]]} and prompts[0][0]["content"] == "x"


@pytest.mark.parametrize("kind", [ValueError, UserError])
def test_the_message_of_a_callable_has_no_secret_of_the_environment(monkeypatch, kind):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "s3cr3t-abcdef")

    def reward(prompts, responses):
        raise kind("denied for s3cr3t-abcdef at https://me:hunter2@host/path by rule 7")

    expected = r"denied for \[MY_SERVICE_TOKEN\] at https://me:\[password\]@host/path by rule 7"
    if kind is UserError:
        with pytest.raises(UserError, match=expected):
            _call(reward, retries=0)
    else:
        assert re.search(expected, _call(reward, retries=0)[2].first_error)
