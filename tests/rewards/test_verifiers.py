"""Verifiable answers, case by case."""

from __future__ import annotations

import functools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxalign.errors import UserError
from jaxalign.rewards.callables import call_reward
from jaxalign.rewards.verifiers import exact_match, last_number, number_match, regex_match

PROMPTS, RESPONSES = ["p", "q", "r"], ["one", "two", "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("It is 72, in total, so she has that much.", 72),
        ("first 3, then 4 ... and 5...", 5),
        ("1,234,567.50 dollars", Fraction("1234567.5")),
        (r"\boxed{9{,}500}", 9500),
        (r"9\,500 m", 9500),
        ("is .5", Fraction(1, 2)),
        ("...5", 5),
        ("007", 7),
        ("-3", -3),
        ("+3", 3),
        ("x=-3", -3),
        ("**-3**", -3),
        ("\u22123 degrees", -3),
        ("$-3", -3),
        ("-$3.00", -3),
        ("5--3", -3),
        ("5-3", 3),
        ("(4)-3", 3),
        ("covid-19", 19),
        ("3–5", 5),
        ("20%", 20),
        ("€20", 20),
        ("20kg", 20),
        ("60 km/h", 60),
        ("12 of H2O and CO2", 12),
        ("12 is x_1", 12),
        ("1e5", 100000),
        ("1.5E-3", Fraction(3, 2000)),
        ("2e5x", 2),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{ 3 }{4}", Fraction(-3, 4)),
        ("2 * 3", 3),
        ("5/month", 5),
        ("#### 1,000", 1000),
        ("9" * 64, int("9" * 64)),
    ],
)
def test_the_last_number_is_read_as_written(text, expected):
    assert last_number(text) == expected
    assert last_number(f"Of 17 cases: {text}") == expected


@pytest.mark.parametrize(
    "text",
    ["12,5", "1,2,3", "1,2345", "3.1.4", "1/2/2020", "1/0", "x/2", "$3/$4", "2 1/2", r"2\frac{1}{2}", "m^2", "x^{2}", "10^-3"]
    + ["9" * 65, "9" * 5000, "1e301", "1e" + "9" * 3000, "1/2e-999"],
)
def test_an_unreadable_last_number_is_refused_and_no_earlier_one_is_used(text):
    assert last_number(f"17 and {text}") is None


@pytest.mark.parametrize("text", ["", "none", "CO2", "x_1", "...", ",,,", "²", "٣"])
def test_text_without_a_number(text):
    assert last_number(text) is None


@settings(max_examples=100, deadline=None)
@given(value=st.fractions(), places=st.integers(0, 6))
def test_formatted_numbers_are_read_back(value, places):
    decimal = f"{float(value):,.{places}f}"
    if len(decimal) <= 64:
        assert last_number(f"so 1 = {decimal}.") == Fraction(decimal.replace(",", ""))
    if len(str(value)) <= 64:
        assert last_number(f"so 1 = {value}.") == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.,/-+$%^{}eE \\frac_x", max_size=40))
def test_any_text_is_handled(text):
    found = last_number(text)
    assert found is None or isinstance(found, Fraction)


def test_a_long_response_is_read_quickly():
    start = time.perf_counter()
    for text in ("." * 50_000, "1" * 50_000, "1,1" * 20_000, "-$" * 50_000, "\\frac{" * 10_000, "1 " * 50_000 + "1/2"):
        last_number(text)
    assert time.perf_counter() - start < 3


def test_number_match_by_hand():
    responses = ["so 1,000", "it is 0.75", "none", "five: 5", "-2", "3"]
    answers = ["12 + 988\n#### 1000", 0.75, "3", Fraction(5), np.float32(-2), "three"]
    scores = number_match(["p"] * 6, responses, answer=answers, another_column=[1] * 6)
    assert scores[:5] == [1, 1, 0, 1, 1]
    assert math.isnan(scores[5])
    # The float .1 means 1/10, and a bool or NaN is no answer.
    unreadable = number_match(["p"] * 4, ["0.1", "1", "1", "1"], answer=[0.1, True, math.nan, None])
    assert unreadable[0] == 1 and all(math.isnan(score) for score in unreadable[1:])


def test_number_match_within_a_tolerance():
    match = functools.partial(number_match, ["p"] * 3, ["3.3", "3.4", "2.7"], answer=[3, 3, 3])
    assert match() == [0, 0, 0]
    assert match(tolerance=0.3) == [1, 0, 1]
    with pytest.raises(UserError, match="tolerance of number_match is -1"):
        match(tolerance=-1)


def test_exact_and_regex_match_by_hand():
    assert exact_match(PROMPTS, [" one\n", "Two", "3"], answer=["one", "two", 3]) == [1, 0, 1]
    assert exact_match(PROMPTS, ["ONE", "Two", "3"], answer=["one", "two", "4"], ignore_case=True) == [1, 1, 0]
    assert regex_match(PROMPTS, RESPONSES, pattern="^t") == [0, 1, 1]
    assert regex_match(PROMPTS, RESPONSES, pattern=[r"\Aone\Z", "(?i)TW", "^x"], answer=RESPONSES) == [1, 1, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (functools.partial(number_match), "number_match needs the column 'answer'"),
        (functools.partial(exact_match, answer=["one"]), "'answer' of exact_match is 1 entries; a list of 3"),
        (functools.partial(exact_match, answer="one"), "'answer' of exact_match is a string"),
        (functools.partial(regex_match), "regex_match needs the column 'pattern'"),
        (functools.partial(regex_match, pattern="("), r"'\(' of regex_match is not a regular expression"),
    ],
)
def test_wrong_columns_are_reported_in_one_sentence_and_not_a_dropped_batch(call, message):
    with pytest.raises(UserError, match=message):
        call(PROMPTS, RESPONSES)
    with pytest.raises(UserError, match=message):
        call_reward(call, PROMPTS, RESPONSES, backoff_s=0)


@pytest.mark.parametrize("text", [
    "\\frac{" + " " * 100_000, "\\frac{" * 50_000, "\\frac{1}{" + " " * 100_000, "1" * 100_000, "1," * 100_000, "-$" * 100_000,
    "{,}" * 100_000, "1e" * 100_000, "/" * 100_000 + "1" * 100_000,
])
def test_reading_a_number_takes_linear_time(text):
    began = time.perf_counter()
    last_number(text)
    assert time.perf_counter() - began < 2


def test_a_pattern_with_catastrophic_backtracking_gives_no_score_and_does_not_hang():
    began = time.perf_counter()
    scores = regex_match(["q"] * 3, ["a" * 40 + "!", "aaa", "b"], pattern=r"\A(a+)+\Z|(a|aa)+\Z")
    assert math.isnan(scores[0]) and scores[1:] == [1, 0] and time.perf_counter() - began < 10


def test_spaces_within_a_fraction_do_not_count():
    assert last_number(r"x = \frac{ 3 }{  4 }") == Fraction(3, 4)
