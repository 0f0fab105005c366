"""Preference pairs from files: every row is used, or listed under its reason."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json

import pytest

from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.base import fit_prompts, split_by_prompt, unique_prompts
from jaxalign.data.sources.lazy import distinct_pairs
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.errors import UserError
from jaxalign.records import Comparison, Message, Prompt


def _transcript(*turns):
    return "".join(f"\n\n{'Assistant' if index % 2 else 'Human'}: {turn}" for index, turn in enumerate(turns))


def _write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def _row(chosen, rejected):
    return {"chosen": _transcript(*chosen), "rejected": _transcript(*rejected)}


_ROWS = [
    _row(["q1", "good"], ["q1", "bad"]),  # line 1
    _row(["q2", ""], ["q2", "bad"]),  # 2: an empty answer
    _row(["q3", "a", "r", "good"], ["q3", "other", "r", "bad"]),  # 3: contexts differ
    _row(["q4", "same"], ["q4", "same"]),  # 4: identical
    "{broken",  # 5
    {"chosen": _transcript("q6", "a")},  # 6: no pair
    _row(["", "good"], ["", "bad"]),  # 7: an empty question
    _row(["one", "a"], ["two", "b"]),  # 8: contexts differ, nothing shared
    {"chosen": [{"role": "user", "content": "q9"}, {"role": "assistant", "content": "good"}],
     "rejected": [{"role": "user", "content": "q9"}, {"role": "assistant", "content": "bad"}]},  # 9
    _row(["q10", "old", "r10", "good"], ["q10", "old", "r10", "bad"]),  # 10
]


def test_every_row_is_used_or_listed_under_its_reason(tmp_path):
    path = _write(tmp_path / "pairs.jsonl", _ROWS)
    pairs, report = read_preferences(path, max_bad_share=0.2)
    assert pairs[0] == Comparison(Prompt("pairs:1", (Message("user", "q1"),), "human"), "good", "bad", label=1.0)
    assert [pair.prompt.id for pair in pairs] == ["pairs:1", "pairs:9", "pairs:10"]
    assert pairs[2].prompt.messages == (Message("user", "q10"), Message("assistant", "old"), Message("user", "r10"))
    assert (report.rows, report.pairs) == (10, 3)
    assert [item.line for item in report.broken] == [5, 6]
    assert report.broken[1].reason == "the key 'rejected' is missing"
    assert report.differing_contexts == (3, 8)
    assert report.identical == (4,)
    assert report.empty_prompts == (7,)
    assert report.empty_answers == (2,)
    assert report.no_common_question == report.cut == report.too_long == ()


def test_rows_that_repeat_an_earlier_row_are_kept_and_listed(tmp_path):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    swapped = {"prompt": "q", "chosen": "bad", "rejected": "good"}
    rows = [pair, swapped, pair, {**pair, "prompt": "r"}, _row(["q", "good"], ["q", "bad"]), swapped]
    pairs, report = read_preferences(_write(tmp_path / "pairs.jsonl", rows))
    assert report.repeated == (3, 5, 6) and report.pairs == 6
    assert report.contradicted == (2, 6)
    assert "3 with the dialogue and the answers of an earlier row; kept, so they weigh more in training (lines 3, 5, 6)" in (
        report.sentences())
    assert [pairs[index] for index in (0, 1, 3)] == distinct_pairs(pairs)


def test_a_repeated_pair_with_another_label_is_distinct(tmp_path):
    pair = Comparison(Prompt("x", (Message("user", "q"),), "human"), "good", "bad", label=1.0)
    other = dataclasses.replace(pair, prompt=dataclasses.replace(pair.prompt, id="y"))
    assert distinct_pairs([pair, other]) == [pair]
    for changed in (dataclasses.replace(other, label=0.5), dataclasses.replace(other, response_a="bad", response_b="good")):
        assert distinct_pairs([pair, changed]) == [pair, changed]


def test_keep_uses_empty_answers_and_differing_contexts_and_still_lists_them(tmp_path):
    path = _write(tmp_path / "pairs.jsonl.gz", _ROWS)
    pairs, report = read_preferences(path, max_bad_share=0.2, differing_contexts="keep", empty_answers="keep")
    by_id = {pair.prompt.id: pair for pair in pairs}
    assert list(by_id) == ["pairs:1", "pairs:2", "pairs:3", "pairs:9", "pairs:10"]
    assert (by_id["pairs:2"].response_a, by_id["pairs:2"].response_b) == ("", "bad")
    assert by_id["pairs:3"].prompt.messages == (Message("user", "q3"),)
    assert by_id["pairs:3"].response_a == "a\n\nHuman: r\n\nAssistant: good"
    assert report.differing_contexts == (3, 8)
    assert report.no_common_question == (8,)
    assert report.empty_answers == (2,)


def test_over_long_dialogues_lose_their_oldest_turns_and_the_longer_answer_counts(tmp_path):
    rows = [
        _row(["x" * 10, "y" * 10, "z" * 10, "a"], ["x" * 10, "y" * 10, "z" * 10, "b" * 5]),
        _row(["x" * 10, "a"], ["x" * 10, "b" * 5]),
        _row(["x" * 11, "a"], ["x" * 11, "b" * 5]),
    ]
    path = _write(tmp_path / "long.jsonl", rows)

    def count(messages, answer):
        return sum(len(message.content) for message in messages) + len(answer)

    pairs, report = read_preferences(path, count_tokens=count, max_tokens=15)
    assert [pair.prompt.messages for pair in pairs] == [(Message("user", "z" * 10),), (Message("user", "x" * 10),)]
    assert (report.cut, report.too_long) == ((1,), (3,))
    assert read_preferences(path, count_tokens=count, max_tokens=35)[1].cut == ()


def test_reading_stops_after_limit_pairs(tmp_path):
    pairs, report = read_preferences(_write(tmp_path / "pairs.jsonl", _ROWS[:4]), limit=1)
    assert (len(pairs), report.rows, report.pairs) == (1, 1, 1)


def test_too_many_broken_rows_are_an_error_with_their_lines(tmp_path):
    path = _write(tmp_path / "pairs.jsonl", _ROWS)
    with pytest.raises(UserError, match=r"2 of 10 lines.*jsonl:5: not JSON.*jsonl:6: the key 'rejected' is missing"):
        read_preferences(path, max_bad_share=0.19)


def test_the_error_of_a_file_without_usable_pairs_counts_its_rows_by_reason(tmp_path):
    path = _write(tmp_path / "pairs.jsonl", [_ROWS[3], _ROWS[6]])
    with pytest.raises(UserError, match=r"2 rows read, 0 pairs kept; 1 with two equal answers; dropped \(lines 1\)"):
        read_preferences(path)
    with pytest.raises(UserError, match="no pair of answers is left: .*0 rows read"):
        read_preferences(_write(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize("option", ["differing_contexts", "empty_answers"])
def test_an_unknown_option_value_is_refused(tmp_path, option):
    path = _write(tmp_path / "pairs.jsonl", _ROWS)
    with pytest.raises(UserError, match=rf"data\.{option} is 'ignore'; 'drop' or 'keep' is expected"):
        read_preferences(path, **{option: "ignore"})


def test_the_report_gives_the_reason_of_the_first_broken_row(tmp_path):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    path = _write(tmp_path / "pairs.jsonl", [pair, {**pair, "weight": -1}, "{"])
    _, report = read_preferences(path, max_bad_share=1.0)
    assert report.sentences()[1] == (
        "2 broken; dropped (lines 2, 3); line 2: weight is '-1'; a number of at least 0 is expected")


def test_the_report_is_plain_json_and_sentences(tmp_path):
    _, report = read_preferences(_write(tmp_path / "pairs.jsonl", _ROWS), max_bad_share=1.0)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["differing_contexts"] == [3, 8]
    assert values["broken"][1] == {"line": 6, "reason": "the key 'rejected' is missing"}
    sentences = report.sentences()
    assert sentences[0].endswith("pairs.jsonl: 10 rows read, 3 pairs kept")
    assert sentences[1].startswith("2 broken; dropped (lines 5, 6); line 5: not JSON: ")
    assert "2 with contexts that differ (dropped unless data.differing_contexts is keep) (lines 3, 8)" in sentences
    assert sentences[-1].startswith("warning: only 3 of 10 rows of ") and sentences[-1].endswith("pairs.jsonl can be used")


def test_a_file_whose_rows_are_mostly_too_long_has_a_warning_with_the_remedy(tmp_path):
    rows = [_row([f"q{i}", "yes" * (60 if i < 3 else 1)], [f"q{i}", "no"]) for i in range(5)]
    path, limits = tmp_path / "pairs.jsonl", {"count_tokens": lambda messages, answer: len(answer), "max_tokens": 100}
    _, report = read_preferences(_write(path, rows), **limits)
    assert len(report.too_long) == 3
    assert report.sentences()[-1] == (f"warning: only 2 of 5 rows of {path} can be used; raise model.max_length, and "
                                      "preference.max_length for pairs and judged answers, if model and memory allow it")
    _, report = read_preferences(_write(path, rows[1:]), **limits)
    assert not any("warning" in sentence for sentence in report.sentences())  # Half of the rows are kept.


def _pair(question, number):
    return Comparison(Prompt(f"p:{number}", (Message("user", question),), "human"), f"a{number}", "b", label=1.0)


def test_unique_prompts_has_each_dialogue_once_in_order():
    pairs = [_pair("q1", 1), _pair("q2", 2), _pair("q1", 3)]
    assert [prompt.id for prompt in unique_prompts(pairs)] == ["p:1", "p:2"]


def test_margins_are_read_only_when_asked(tmp_path):
    """A row without a margin has margin 0. Invalid margins are listed and their pairs are still used, so the pairs do not
    change."""
    margins = [1.5, None, "much", -1, True, 2, [1]]
    rows = [_row([f"q{i}", "good"], [f"q{i}", "bad"]) for i in range(7)]
    rows = [row if margin is None else row | {"margin": margin} for row, margin in zip(rows, margins, strict=True)]
    path = _write(tmp_path / "pairs.jsonl", rows)
    pairs, report = read_preferences(path, margins=True)
    assert [pair.margin for pair in pairs] == [1.5, 0, 0, 0, 0, 2.0, 0]
    assert report.bad_margins == (3, 4, 5, 7) and report.broken == ()
    assert any("with a margin that is not a number" in sentence for sentence in report.sentences())
    plain, report = read_preferences(path)
    assert [pair.margin for pair in plain] == [None] * 7 and report.bad_margins == ()
    assert [pair.prompt for pair in plain] == [pair.prompt for pair in pairs]
    with pytest.raises(UserError, match='no row of .* has a "margin" above 0, and config.preference.margin_weight'):
        read_preferences(_write(tmp_path / "none.jsonl", rows[1:2]), margins=True)


def test_a_dialogue_that_the_chat_template_rejects_is_listed_and_affects_no_other(tmp_path):
    def count(messages, answer):
        if any(a.role == b.role for a, b in itertools.pairwise(messages)):
            raise DialogueRefused("roles must alternate")
        return 1

    asked = [{"role": "user", "content": "a"}]
    rows = [{"prompt": asked * times, "chosen": "b", "rejected": "c"} for times in (1, 2, 1)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, report = read_preferences(path, count_tokens=count, max_tokens=5)
    assert [pair.prompt.id for pair in pairs] == ["pairs:1", "pairs:3"] and report.refused == (2,)
    assert "1 rejected by the chat template or the style; dropped (lines 2)" in report.sentences()


def test_a_prompt_that_the_chat_template_rejects_is_listed():
    def count(messages):
        if len(messages) == 2:
            raise DialogueRefused("roles must alternate")
        return 1

    prompts = [Prompt(f"p:{n}", (Message("user", "a"),) * n, "human") for n in (1, 2, 3)]
    fitted = fit_prompts(prompts, count, 5)
    assert (fitted.prompts, fitted.refused, fitted.too_long) == ([prompts[0], prompts[2]], ("p:2",), ())


def test_prompts_are_cut_at_a_turn_or_listed_as_too_long():
    turns = (Message("user", "aaaa"), Message("assistant", "bb"), Message("user", "ccc"))
    prompts = [Prompt("p:1", turns, "human"), Prompt("p:2", turns[2:], "human"), Prompt("p:3", turns[:1], "human")]
    fitted = fit_prompts(prompts, lambda messages: sum(len(message.content) for message in messages), 3)
    assert fitted.prompts == [Prompt("p:1", turns[2:], "human"), Prompt("p:2", turns[2:], "human")]
    assert (fitted.cut, fitted.too_long) == (("p:1",), ("p:3",))


def test_no_dialogue_is_on_both_sides_of_the_split_and_order_does_not_matter():
    pairs = [_pair(f"q{number % 40}", number) for number in range(100)]
    train, held = split_by_prompt(pairs, 0.25, seed=3)
    questions = [{pair.prompt.messages for pair in part} for part in (train, held)]
    assert len(questions[1]) == 10
    assert not questions[0] & questions[1]
    assert len(train) + len(held) == 100
    reverse = split_by_prompt(pairs[::-1], 0.25, seed=3)[1]
    assert {pair.prompt.id for pair in reverse} == {pair.prompt.id for pair in held}
    assert split_by_prompt(pairs, 0.25, seed=4)[1] != held


def test_a_split_keeps_at_least_one_dialogue_on_each_side():
    pairs = [_pair("q1", 1), _pair("q2", 2)]
    assert split_by_prompt(pairs, 0.0) == (pairs, [])
    assert [len(part) for part in split_by_prompt(pairs, 0.01)] == [1, 1]
    with pytest.raises(UserError, match="one.jsonl: data.held_out_share is 0.5, which leaves none of 1 distinct dialogue to "
                                        "train on; set it to 0, or give more rows"):
        split_by_prompt(pairs[:1], 0.5, where="one.jsonl", field="data.held_out_share")
    with pytest.raises(UserError, match="the rows: held_out_share is 0.9, which leaves none of 2 distinct dialogues to train "
                                        "on; lower it, or give more rows"):
        split_by_prompt(pairs, 0.9)


def _harmless(real_data):
    path = real_data / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    if not path.exists():
        pytest.skip("the HH-RLHF test file is absent")
    return path


def test_the_real_file_reports_its_five_odd_rows_and_four_empty_answers(real_data):
    pairs, report = read_preferences(_harmless(real_data))
    assert report.rows == 2312
    assert report.differing_contexts == (1255, 1689, 1951, 1953, 2037)
    assert report.empty_answers == (87, 517, 926, 1104)
    assert report.broken == report.identical == report.empty_prompts == report.no_common_question == ()
    assert report.pairs == len(pairs) == 2312 - 5 - 4
    kept, report = read_preferences(_harmless(real_data), differing_contexts="keep", empty_answers="keep")
    assert len(kept) == 2312
    assert [pair.prompt.id for pair in kept if not pair.response_a] == [
        f"harmless-base-test:{line}" for line in (87, 517, 926, 1104)
    ]


def test_no_text_of_the_real_file_is_lost_or_moved(real_data):
    """Joined again, every pair that is used has the words of both transcripts, in order."""
    pairs, _ = read_preferences(_harmless(real_data), differing_contexts="keep", empty_answers="keep")
    with gzip.open(_harmless(real_data), "rt", encoding="utf-8", newline="\n") as stream:
        rows = [json.loads(line) for line in stream]
    names = {"user": "Human:", "assistant": "Assistant:"}
    for pair, row in zip(pairs, rows, strict=True):
        context = " ".join(f"{names[message.role]} {message.content}" for message in pair.prompt.messages)
        for key, answer in (("chosen", pair.response_a), ("rejected", pair.response_b)):
            assert f"{context} Assistant: {answer}".split() == row[key].split()


def test_the_report_accounts_for_every_row(real_data):
    def count(messages, answer):
        return sum(len(message.content) for message in messages) + len(answer)

    _, report = read_preferences(_harmless(real_data), count_tokens=count, max_tokens=400)
    dropped = (
        "broken",
        "identical",
        "no_common_question",
        "empty_prompts",
        "too_long",
        "refused",
        "differing_contexts",
        "empty_answers",
    )
    assert report.rows == report.pairs + sum(len(getattr(report, field)) for field in dropped)
    assert report.cut
    assert report.too_long
    assert dataclasses.is_dataclass(report)


def test_gold_pairs_have_ties_principles_and_kinds(tmp_path):
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "q3"}
    path = _write(tmp_path / "gold.jsonl", [
        {"prompt": "q1", "chosen": "good", "rejected": "bad", "principle": "harm-1", "kind": "harm"},
        {"prompt": "q2", "chosen": "one", "rejected": "two", "tie": True},
        {"messages": [system, user], "chosen": "good", "rejected": "bad", "tie": False},
        _row(["q4", "good"], ["q4", "bad"]),
    ])
    pairs, report = read_preferences(path, gold=True)
    assert [(pair.label, pair.decided, pair.principles) for pair in pairs] == [
        (1.0, True, ("harm-1",)), (0.5, False, ()), (1.0, True, ()), (1.0, True, ())]
    assert [pair.prompt.columns for pair in pairs] == [{"kind": "harm"}, {}, {}, {}]
    assert [message.role for message in pairs[2].prompt.messages] == ["system", "user"] and report.pairs == 4


@pytest.mark.parametrize(("field", "value"), [("tie", "yes"), ("principle", 3), ("kind", ["harm"])])
def test_a_gold_pair_with_a_malformed_field_is_broken(tmp_path, field, value):
    path = _write(tmp_path / "gold.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b", field: value}])
    with pytest.raises(UserError, match=f"gold.jsonl:1: {field} is .* is expected"):
        read_preferences(path, gold=True)


def test_a_pair_may_begin_with_a_system_message(tmp_path):
    """Its text in only one of the two dialogues makes their contexts differ."""
    rule, asked = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "q"}
    whole = {name: [rule, asked, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    rows = [whole, {"prompt": [rule, asked], "chosen": "good", "rejected": "bad"}, whole | {"rejected": whole["rejected"][1:]}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, report = read_preferences(path)
    assert [pair.prompt.messages for pair in pairs] == [(Message("system", "Be kind."), Message("user", "q"))] * 2
    assert report.broken == () and report.differing_contexts == (3,)


@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl", "pairs.json.gz"])
@pytest.mark.parametrize("indent", [None, 4])
def test_a_json_array_is_read_like_lines_and_its_items_are_numbered(tmp_path, name, indent):
    rows = [row for row in _ROWS if isinstance(row, dict)]
    lines = read_preferences(_write(tmp_path / "lines.jsonl", rows), max_bad_share=0.2)[0]
    text = "\n" + json.dumps(rows, indent=indent)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    pairs, report = read_preferences(tmp_path / name, max_bad_share=0.2, name="lines")
    assert pairs == lines and len(pairs) > 2
    assert f"{report.broken[0].line} {report.unit}" == "5 item"
    with pytest.raises(UserError, match=rf"1 of 9 items of .*{name}, item 5: the key 'rejected' is missing"):
        read_preferences(tmp_path / name)


def test_an_array_that_is_not_json_is_one_error_with_its_line(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(_ROWS[:1] * 3, indent=2)[:-1])
    with pytest.raises(UserError, match=r'begins with "\[" like a JSON array but is not JSON: .* on line \d+, column \d+;'):
        read_preferences(path)


def test_a_first_line_that_begins_with_a_bracket_does_not_make_a_file_an_array(tmp_path):
    pairs, report = read_preferences(_write(tmp_path / "pairs.jsonl", ["[1]", _ROWS[0], "[half"]), max_bad_share=0.9)
    assert len(pairs) == 1 and [item.line for item in report.broken] == [1, 3]


@pytest.mark.parametrize("row", [
    {"conversations": [{"from": "human", "value": "q"}], "id": 1}, {"instruction": "q", "output": "a"}, {"text": "a"},
])
def test_rows_without_the_expected_columns_are_one_reason_with_the_columns_found(tmp_path, row):
    path = _write(tmp_path / "pairs.jsonl", [row] * 7)
    with pytest.raises(UserError) as raised:
        read_preferences(path)
    message = str(raised.value)
    assert message.count("the key 'chosen' is missing") == 1 and f"{path}:1 and 6 other lines: " in message
    assert f"; the columns are {', '.join(row)}: " in message and message.count("data.columns") == 1
    assert "max_bad_share" not in message
    assert len(read_preferences(_write(path, [{"good": _transcript("q", "a"), "bad": _transcript("q", "b")}] * 3),
                                columns=("chosen=good", "rejected=bad"))[0]) == 3


def test_the_weight_of_a_row_is_that_of_its_pair(tmp_path):
    weights = [2, 0, None, -1, True, "3"]
    rows = [_row([f"q{i}", "good"], [f"q{i}", "bad"]) | {"weight": weight} for i, weight in enumerate(weights)]
    rows.append(_row(["q", "good"], ["q", "bad"]))
    pairs, report = read_preferences(_write(tmp_path / "pairs.jsonl", rows), max_bad_share=0.5)
    assert [pair.weight for pair in pairs] == [2.0, 0.0, 1.0, 1.0]
    assert [item.line for item in report.broken] == [4, 5, 6]
    assert report.broken[0].reason == "weight is '-1'; a number of at least 0 is expected"
