"""A judge that raises or returns unusable results: repeated calls, requests set aside, and the limit on their share."""

from __future__ import annotations

import json
import logging
import math
import re

import jax
import numpy as np
import pytest

from jaxalign.config import JudgeConfig
from jaxalign.errors import UserError
from jaxalign.feedback.checked import CheckedJudge
from jaxalign.feedback.judge import (
    ComparisonRequest,
    CritiqueRequest,
    Draw,
    Rating,
    RatingRequest,
    RevisionRequest,
    Text,
    Verdict,
)
from jaxalign.records import Message
from tests.feedback.fakes import PRINCIPLES

PLACE = r"[^ ]*test_checked\.py:\d+"
DIALOGUE = (Message("user", "Hi"),)
REQUESTS = {
    "critique": lambda text: CritiqueRequest(DIALOGUE, text, PRINCIPLES[0]),
    "revise": lambda text: RevisionRequest(DIALOGUE, text, PRINCIPLES[0], "too long"),
    "compare": lambda text: ComparisonRequest(DIALOGUE, text, "b", PRINCIPLES[0]),
    "rate": lambda text: RatingRequest(DIALOGUE, text, PRINCIPLES[0]),
}
ANSWERS = {"critique": Text("c"), "revise": Text("c"), "compare": Verdict(0.75), "rate": Rating(8.0)}
FAILED = {
    "critique": Text("", complete=False, problem="failed"), "revise": Text("", complete=False, problem="failed"),
    "compare": Verdict(None, problem="failed"), "rate": Rating(None, problem="failed"),
}


class Answering:
    """Answers with `respond(response, call)` for each request, and records the rows of each call."""

    def __init__(self, respond):
        self.respond, self.calls = respond, []

    def critique(self, requests, draw):
        self.calls.append(list(draw.rows))
        texts = [request.first if hasattr(request, "first") else request.response for request in requests]
        return [self.respond(text, len(self.calls)) for text in texts]

    revise = compare = rate = critique


def ask(respond, method="compare", count=4, **settings):
    """(results, rows of each call) of a judge that is asked about the responses "0", "1", ... in the rows 10, 11, ..."""
    judge = Answering(respond)
    requests = [REQUESTS[method](str(i)) for i in range(count)]
    checked = CheckedJudge(judge, "mine", JudgeConfig(**settings))
    return getattr(checked, method)(requests, Draw(jax.random.key(0), range(10, 10 + count))), judge.calls


def raising(bad, error=ConnectionError, method="compare"):
    """A response function that always raises for the responses in `bad`."""
    def respond(response, call):
        if response in bad:
            raise error(f"no answer to {response}")
        return ANSWERS[method]
    return respond


def test_a_call_that_raises_is_repeated():
    def respond(response, call):
        if call <= 2:
            raise TimeoutError("busy")
        return 0.75

    results, calls = ask(respond)
    assert results == [Verdict(0.75)] * 4 and calls == [[10, 11, 12, 13]] * 3


@pytest.mark.parametrize("method", REQUESTS)
def test_requests_that_fail_again_are_set_aside_and_counted(method, caplog):
    with caplog.at_level(logging.WARNING, logger="jaxalign"):
        results, calls = ask(raising("13", method=method), method, retries=1, max_failed_share=0.5)
    good, bad = ANSWERS[method], FAILED[method]
    assert results == [good, bad, good, bad]
    assert calls == [[10, 11, 12, 13]] * 2 + [[10], [11], [12], [13]]
    (message,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(rf"judge 'mine' failed to answer 2 of 4 requests to '{method}' \(it raised ConnectionError at {PLACE} "
                        rf"in '{method}': no answer to 1\); these requests have no result", message)


def test_too_many_failed_requests_stop_the_run_at_once():
    judge = Answering(raising("0123"))
    checked = CheckedJudge(judge, "mine", JudgeConfig(retries=1, max_failed_share=0.25))
    message = r"2 of the first 2 requests to 'compare', of 4 in all .*no answer to 0\), more than config.judge.max_failed_share"
    with pytest.raises(UserError, match=message) as raised:
        checked.compare([REQUESTS["compare"](str(i)) for i in range(4)], Draw(jax.random.key(0), range(4)))
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert judge.calls == [[0, 1, 2, 3]] * 2 + [[0], [1]]


def test_without_retries_no_request_is_asked_again():
    assert ask(raising("1"), retries=0, max_failed_share=1.0) == ([FAILED["compare"]] * 4, [[10, 11, 12, 13]])
    with pytest.raises(UserError, match="failed to answer 4 of 4 requests"):
        ask(raising("1"), retries=0)


def test_a_single_request_is_not_asked_once_more_by_itself():
    assert ask(raising("0"), count=1, retries=2, max_failed_share=1.0) == ([FAILED["compare"]], [[10]] * 3)


def test_an_exit_of_the_judge_counts_as_a_failure_and_an_interrupt_does_not():
    results, _ = ask(raising("1", SystemExit), max_failed_share=0.5)
    assert results[1] == FAILED["compare"]
    with pytest.raises(KeyboardInterrupt):
        ask(raising("1", KeyboardInterrupt))


def test_a_user_error_of_the_judge_stops_the_run_without_a_retry():
    judge = Answering(raising("0", UserError))
    with pytest.raises(UserError, match="^no answer to 0$"):
        CheckedJudge(judge).compare([REQUESTS["compare"]("0")], Draw(jax.random.key(0), [0]))
    assert len(judge.calls) == 1


@pytest.mark.parametrize(("method", "result", "expected"), [
    ("compare", math.nan, Verdict(None, problem="nan")),
    ("compare", Verdict(math.nan, "why"), Verdict(None, "why", "nan")),
    ("compare", None, Verdict(None, problem="none")),
    ("compare", Verdict(None, "why", "refused"), Verdict(None, "why", "refused")),
    ("rate", math.nan, Rating(None, problem="nan")),
    ("rate", Rating(None), Rating(None, problem="none")),
    ("rate", 7, Rating(7.0)),
    ("critique", None, Text("", False, "none")),
    ("revise", Text("half", False, "cut_off"), Text("half", False, "cut_off")),
    ("revise", Text("No.", True, "refused"), Text("No.", False, "refused")),
    ("revise", "bare", Text("bare")),
])
def test_results_without_a_value_name_the_problem(method, result, expected):
    assert ask(lambda response, call: result, method)[0] == [expected] * 4


@pytest.mark.parametrize(("method", "result", "message"), [
    ("compare", 1.5, r"it returned 1.5 from 'compare'; a number from 0 to 1 is expected"),
    ("rate", Rating(0.5), "a number from 1 to 10 is expected"),
    ("rate", 15, "a number from 1 to 10 is expected"),
    ("rate", math.inf, "a number from 1 to 10 is expected"),
    ("compare", "A", "a Verdict is expected"),
    ("critique", 3, "a Text is expected"),
    ("critique", Text(3), "a text of type str is expected"),
    ("compare", Verdict(0.5, ["why"]), "a reasoning of type str, or None, is expected"),
    ("compare", Verdict(None, None, "tired"), "a problem among failed, nan, none"),
])
def test_pitfall_26_results_of_the_wrong_type_or_out_of_range_are_errors(method, result, message):
    """Scores of 7, 10 and 15 on a scale from 0 to 1 were used as they were."""
    with pytest.raises(UserError, match=message):
        ask(lambda response, call: result, method)


def test_an_error_of_a_judge_on_all_processes_is_not_retried():
    judge = Answering(raising("0"))
    checked = CheckedJudge(judge, "mine", on_all_processes=True)
    with pytest.raises(UserError, match=f"judge 'mine' raised ConnectionError at {PLACE} in 'compare': no answer to 0"):
        checked.compare([REQUESTS["compare"]("0")], Draw(jax.random.key(0), [0]))
    assert len(judge.calls) == 1


def test_the_numbers_of_numpy_become_json_values():
    verdicts, _ = ask(lambda text, call: Verdict(np.float32(0.75), outside=np.float32(0.25), disagreement=np.float32(0.5)))
    assert json.loads(json.dumps(verdicts[0])) == [0.75, None, None, 0.25, [], 0.5, None]


@pytest.mark.parametrize("value", ["much", math.nan])
def test_an_outside_mass_that_is_no_number_stops_the_run(value):
    with pytest.raises(UserError, match="a finite number, or None, as outside is expected"):
        ask(lambda text, call: Verdict(0.5, outside=value))
