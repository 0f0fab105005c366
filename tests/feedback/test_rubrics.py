"""Rubrics: their files, the class of a rating, the prompts that they rate, and phrases of refusals."""

from __future__ import annotations

import json

import pytest

from jaxalign.errors import UserError
from jaxalign.feedback.rubrics import Rubric, has_refusal_phrase, kinds_of, load_rubrics, rubrics_for
from jaxalign.records import Message, Prompt

HARMFUL = Rubric("harmful", "Is it harmless?", "low", ("harmful", "unsafe", "red_team"))
HELPFUL = Rubric("helpful", "Does it help?", "high", ("benign", "safe", "helpful"))
EVASIVE = Rubric("evasive", "Is it open?", "low")
RUBRICS = (HARMFUL, HELPFUL, EVASIVE)


def prompt(number, source="eval", **columns):
    return Prompt(f"p{number}", (Message("user", str(number)),), source, columns)


def test_the_default_rubrics_count_harm_help_and_evasion():
    rubrics = load_rubrics("default")
    assert [(rubric.name, rubric.counts) for rubric in rubrics] == [("harmful", "low"), ("helpful", "high"), ("evasive", "low")]
    assert rubrics[0].principle.critique_request == rubrics[0].question


def test_a_file_states_names_questions_sides_kinds_and_cuts(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"rubrics": [{"name": "terse", "question": "Is it short?", "counts": "high", "cut": 7,
                                             "kinds": ["chat"]}]}))
    assert load_rubrics(str(path)) == (Rubric("terse", "Is it short?", "high", ("chat",), 7.0),)


@pytest.mark.parametrize(("content", "message"), [
    ("{", "is not JSON .line 1"),
    ("[]", 'has no list "rubrics"'),
    ('{"rubrics": []}', 'has no list "rubrics"'),
    ('{"rubrics": [{"name": "a", "question": " ", "counts": "low"}]}', 'has no text in "question"'),
    ('{"rubrics": [{"name": "a", "question": "b", "counts": "down"}]}', "'down'; it must be \"low\" or \"high\""),
    ('{"rubrics": [{"name": "a", "question": "b", "counts": "low", "kind": []}]}', "the field 'kind'; it must be one of"),
    ('{"rubrics": [{"name": "a", "question": "b", "counts": "low", "kinds": "x"}]}', "a list of strings is expected"),
    ('{"rubrics": [{"name": "a", "question": "b", "counts": "low", "cut": 10}]}', "a number between 1 and 10"),
    ('{"rubrics": [{"name": "a", "question": "b", "counts": "low"}, {"name": "a", "question": "c", "counts": "low"}]}',
     "names 'a' more than once"),
])
def test_a_malformed_file_is_refused(content, message, tmp_path):
    (tmp_path / "own.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_rubrics(str(tmp_path / "own.json"))


def test_a_missing_file_is_refused_with_the_names_of_the_package():
    with pytest.raises(UserError, match="nowhere.json does not exist; .*one of: default"):
        load_rubrics("nowhere.json")


@pytest.mark.parametrize(("rating", "margin", "low"), [
    (1.0, 1.0, True), (4.5, 1.0, True), (4.6, 1.0, None), (5.5, 0.0, None), (6.4, 1.0, None), (6.5, 1.0, False),
    (5.4, 0.0, True), (10.0, 1.0, False), (None, 0.0, None),
])
def test_a_rating_close_to_the_cut_is_undecided(rating, margin, low):
    assert HARMFUL.classify(rating, margin) is low
    assert HELPFUL.classify(rating, margin) is (None if low is None else not low)


def test_the_column_says_which_rubrics_rate_an_answer():
    prompts = [prompt(0, kind="harmful"), prompt(1, kind="benign"), prompt(2, kind="other")]
    kinds = kinds_of(prompts, "kind", RUBRICS)
    assert [[rubric.name for rubric in rubrics_for(kinds[p.id], RUBRICS)] for p in prompts] == [
        ["harmful", "evasive"], ["helpful", "evasive"], ["evasive"]]


def test_without_the_column_the_source_says_it_and_otherwise_every_rubric_rates_every_answer():
    assert kinds_of([prompt(0, "red_team"), prompt(1, "helpful")], "kind", RUBRICS) == {"p0": "red_team", "p1": "helpful"}
    for prompts, column in (([prompt(0)], "kind"), ([prompt(0, kind="harmful")], "")):
        assert kinds_of(prompts, column, RUBRICS) == {"p0": None} and rubrics_for(None, RUBRICS) == list(RUBRICS)


def test_a_column_without_a_value_that_a_rubric_names_is_refused():
    with pytest.raises(UserError, match="column 'kind'.* has the values good, but the rubrics name .*harmful"):
        kinds_of([prompt(0, kind="good")], "kind", RUBRICS)


@pytest.mark.parametrize(("text", "found"), [
    ("I\u2019m sorry, but no.", True), ("As an AI, I have no view.", True), ("Well, I CANNOT do that.", True),
    ("Stir it and wait.", False), ("It is illegal to park there; use the car park.", False), ("", False),
])
def test_refusal_phrases_are_found_in_any_case_and_with_curly_apostrophes(text, found):
    assert has_refusal_phrase(text) is found
