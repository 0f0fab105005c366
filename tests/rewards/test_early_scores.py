"""Scores requested as responses end: in one thread, each row once, all waiting rows in one call, and none lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.rewards.callables import call_reward
from jaxalign.rewards.functions import EarlyScores
from jaxalign.rollout.responses import Response


def response(*ids: int, ended: bool = False) -> Response:
    return Response(ids, ended, 0.0)


def test_a_call_has_all_responses_that_ended_during_the_previous_call_and_sampling_does_not_wait():
    calls, free, begun = [], threading.Event(), threading.Event()

    def ask(rows, responses):
        begun.set()
        assert free.wait(30)
        calls.append((list(rows), [r.ids[: len(r.ids) - r.ended] for r in responses]))
        return call_reward(lambda prompts, texts: [10.0 * row for row in prompts], rows, [""] * len(rows))

    scores = EarlyScores(ask)
    scores.add([(2, response(5, 9, ended=True))])
    assert begun.wait(30)  # while other responses are sampled
    scores.add([(0, response(7))])
    scores.add([(3, response(1, 1, 9, ended=True)), (1, response())])
    assert not calls
    free.set()
    found, kept, report = scores.result(5)
    assert calls == [([2], [(5,)]), ([0, 3, 1], [(7,), (1, 1), ()])]
    np.testing.assert_array_equal(found, np.array([0, 10, 20, 30, 0], np.float32))
    assert kept.tolist() == [True] * 4 + [False] and report.first_error is None


def test_rows_without_a_score_are_reported_with_the_first_reason():
    def judge(prompts, responses):
        return [None if row == 1 else 0.5 for row in prompts]

    scores = EarlyScores(lambda rows, ids: call_reward(judge, rows, [""] * len(rows)))
    scores.add([(1, response(4)), (0, response(4))])
    found, kept, report = scores.result(2)
    assert found.tolist() == [0.5, 0] and kept.tolist() == [True, False]
    assert report.first_error == "the score of row 0 is None (NoneType); a finite number is expected"


def test_an_error_for_the_user_is_raised_where_the_scores_are_needed():
    def ask(rows, ids):
        raise UserError("no column 'answer'")

    scores = EarlyScores(ask)
    scores.add([(0, response(4))])
    with pytest.raises(UserError, match="no column 'answer'"):
        scores.result(1)


def test_the_exception_of_the_first_failed_call_is_returned():
    def broken(prompts, responses):
        raise KeyError("answer")

    scores = EarlyScores(lambda rows, ids: call_reward(broken, rows, [""] * len(rows), retries=0))
    scores.add([(0, response(4))])
    report = scores.result(1)[2]
    assert "broken raised KeyError at " in report.first_error and isinstance(report.cause, KeyError)


def test_scores_of_tokens_are_joined():
    def ask(rows, responses):
        ids = [list(r.ids) for r in responses]
        details = {"token_ids": ids, "ended": [False] * len(ids), "raw_responses": [""] * len(ids)}
        values = [[float(i) for i in own] if len(own) > 1 else 7.0 for own in ids]
        return call_reward(lambda *_: values, rows, [""] * len(rows), details=details)

    scores = EarlyScores(ask)
    scores.add([(2, response(5, 9))])
    scores.add([(0, response(4))])
    scores.add([(1, response(1, 2, 3))])
    found, kept, *_ = scores.result(3)
    np.testing.assert_array_equal(found, [[7, 0, 0], [1, 2, 3], [5, 9, 0]])
    assert kept.all()
