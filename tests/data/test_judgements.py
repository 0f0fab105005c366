"""Files of single judged answers: every row is used, or counted and listed under its reason."""

from __future__ import annotations

import gzip
import json

import pytest

from jaxalign.data.chat.template import DialogueRefused
from jaxalign.data.sources.base import split_by_prompt, unique_prompts
from jaxalign.data.sources.jsonl import BrokenLine
from jaxalign.data.sources.judgements import read_judgements
from jaxalign.errors import UserError
from jaxalign.reasons import often_contradicted
from jaxalign.records import Demonstration, Message, Prompt


def row(prompt="q", completion="a", label=True):
    return {"prompt": prompt, "completion": completion, "label": label}


def write(path, rows):
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    data = text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_prompts_and_completions_can_be_text_or_messages(tmp_path, name):
    path = write(tmp_path / name, [
        row("What?", " That. ", True),
        row(TALK, [{"role": "assistant", "content": "four"}], False),
        row("\n\nHuman: one\n\nAssistant: two\n\nHuman: three\n\nAssistant:", "five"),
        row(TALK, "six", False) | {"score": 3, "id": "kept out of it"},
    ])
    found, report = read_judgements(path)
    talk = (Message("user", "one"), Message("assistant", "two"), Message("user", "three"))
    assert [(one.prompt.messages, one.response, one.desirable) for one in found] == [
        ((Message("user", "What?"),), "That.", True), (talk, "four", False), (talk, "five", True), (talk, "six", False)
    ]
    assert [one.prompt.id for one in found] == ["rows:1", "rows:2", "rows:3", "rows:4"]
    assert (report.rows, report.desirable, report.undesirable) == (4, 2, 2)
    assert report.sentences() == [f"{path}: 4 rows read, 2 good and 2 bad answers kept"]


def test_labels_may_be_1_and_0(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row(label=1), row("other", label=0), row("third", label=1.0)])
    found, report = read_judgements(path)
    assert [one.desirable for one in found] == [True, False, True] and not report.broken


def test_repeated_and_contradicted_answers_are_counted_and_told(tmp_path):
    rows = [row(), row(), row(label=False), row("other", label=False), row(label=True)]
    found, report = read_judgements(write(tmp_path / "rows.jsonl", rows))
    assert len(found) == 5 and report.repeated == (2, 5) and report.contradicted == (3,)
    assert report.sentences()[-1] == (
        f"warning: 1 of 5 rows of {tmp_path / 'rows.jsonl'} contradict an earlier row; remove these rows, or correct their "
        "labels or data.columns")
    assert often_contradicted("x", 100, 5) is None and often_contradicted("x", 100, 6) is not None


@pytest.mark.parametrize(("bad", "reason"), [
    ("{", "not JSON"),
    ("[1]", "an object"),
    ({"prompt": "q", "completion": "a"}, "the key 'label' is missing"),
    ({"prompt": "q", "label": True}, "the key 'completion' is missing"),
    ({"completion": "a", "label": True}, "the key 'prompt' is missing"),
    (row(label=2), "label is '2'; true or false, or 1 or 0, is expected"),
    (row(label="true"), "label is 'true'; true or false, or 1 or 0, is expected"),
    (row(label=None), "label is 'None'"),
    (row(prompt=None), "prompt: type NoneType"),
    (row(prompt=7), "prompt: type int"),
    (row(prompt=[]), "does not end with the user's turn"),
    (row(prompt=TALK[:2]), "does not end with the user's turn"),
    (row(prompt=[SYSTEM]), "does not end with the user's turn"),
    (row(prompt=[*TALK, SYSTEM]), "prompt: message 4"),
    (row(completion=[SYSTEM]), "does not begin and end with the assistant's turn"),
    (row(completion=None), "completion: type NoneType"),
    (row(completion=[]), "does not begin and end with the assistant's turn"),
    (row(completion=TALK[:1]), "does not begin and end with the assistant's turn"),
    (row(completion=[{"role": "assistant"}]), "completion: message 1"),
])
def test_a_broken_row_is_left_out_with_its_line_and_reason(tmp_path, bad, reason):
    path = write(tmp_path / "rows.jsonl", [row(), bad, row(label=False)])
    found, report = read_judgements(path, max_bad_share=0.5)
    assert [one.prompt.id for one in found] == ["rows:1", "rows:3"]
    (broken,) = report.broken
    assert isinstance(broken, BrokenLine) and broken.line == 2 and reason in broken.reason
    assert report.sentences()[1] == f"1 broken; dropped (lines 2); line 2: {broken.reason}" and json.dumps(report.to_dict())
    with pytest.raises(UserError, match=r"1 of 3 lines of .* are broken.*rows.jsonl:2: "):
        read_judgements(path, max_bad_share=0.1)


def test_empty_prompts_and_answers_are_counted_and_can_be_kept(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row(), row(" "), row("q2", " "), row("q3", "", False)])
    found, report = read_judgements(path)
    assert (len(found), report.empty_prompts, report.empty_answers) == (1, (2,), (3, 4))
    found, report = read_judgements(path, empty_answers="keep")
    assert [one.response for one in found] == ["a", "", ""]
    assert (report.desirable, report.undesirable, report.empty_answers) == (2, 1, (3, 4))


def test_long_dialogues_lose_their_oldest_turns(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row(TALK, "four"), row("a long question", "yes"), row("short", "ok", False)])

    def count(messages, answer):
        return sum(len(m.content) for m in messages) + len(answer)

    found, report = read_judgements(path, count_tokens=count, max_tokens=10)
    assert [one.prompt.messages[0].content for one in found] == ["three", "short"]
    assert (report.cut, report.too_long) == ((1,), (2,))


def test_several_answers_to_a_prompt_stay_together_in_the_split(tmp_path):
    rows = [row(f"q{i % 5}", f"a{i}", i % 2 == 0) for i in range(20)]
    found, _ = read_judgements(write(tmp_path / "rows.jsonl", rows))
    assert len(found) == 20 and len(unique_prompts(found)) == 5
    train, held = split_by_prompt(found, 0.2, 3)
    assert len(train) == 16 and len(held) == 4 and len(unique_prompts(held)) == 1


def test_reading_stops_at_the_limit_and_a_file_without_usable_rows_is_an_error(tmp_path):
    path = write(tmp_path / "rows.jsonl", [row()] * 5)
    assert len(read_judgements(path, limit=2)[0]) == 2
    with pytest.raises(UserError, match="no judged answer is left: .*1 rows read, 0 good and 0 bad"):
        read_judgements(write(tmp_path / "none.jsonl", [row(" ")]))
    with pytest.raises(UserError, match="does not exist"):
        read_judgements(tmp_path / "absent.jsonl")


SAID = {"role": "assistant", "content": " four "}


@pytest.mark.parametrize(("given", "messages", "answer"), [
    ({"messages": [SYSTEM, *TALK, SAID]}, [SYSTEM, *TALK], " four "),
    ({"messages": "\n\nHuman: one\n\nAssistant: two"}, TALK[:1], "two"),
    ({"prompt": [SYSTEM, *TALK], "completion": [SAID]}, [SYSTEM, *TALK], " four "),
    ({"prompt": "one", "response": " two "}, TALK[:1], "two"),
    ({"instruction": "one", "input": "", "output": "two"}, TALK[:1], "two"),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, [{"role": "user", "content": "Add.\n\n1 2"}], "3"),
    ({"system": "Be brief.", "question": "one", "answer": "two"}, [SYSTEM, *TALK[:1]], "two"),
    ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}, TALK[:1], "two"),
])
def test_the_last_message_of_a_dialogue_is_the_answer_to_imitate(tmp_path, given, messages, answer):
    found, report = read_judgements(write(tmp_path / "rows.jsonl", [given]), judged=False)
    assert found == [Demonstration(Prompt("rows:1", tuple(Message(**one) for one in messages), "human"), answer)]
    assert report.sentences() == [f"{tmp_path / 'rows.jsonl'}: 1 rows read, 1 answers kept"]


@pytest.mark.parametrize("given", [
    {"messages": TALK}, {"messages": [SYSTEM, SAID]}, {"messages": []}, {"messages": None}, {"messages": [*TALK, SYSTEM, SAID]},
    {"messages": [*TALK, {"role": "tool", "content": "x"}]}, {"prompt": "one"}, {"text": "one"}, row(completion=None),
])
def test_a_row_without_an_answer_is_broken(tmp_path, given):
    path = write(tmp_path / "rows.jsonl", [given, row()])
    found, report = read_judgements(path, judged=False, max_bad_share=0.5)
    assert len(found) == 1 and [place.line for place in report.broken] == [1]


@pytest.mark.parametrize("judged", [True, False])
def test_a_system_message_is_kept_or_its_row_is_listed(tmp_path, judged):
    def count(messages, answer):
        if messages[0].role == "system":
            raise DialogueRefused("no place for it")
        return 1

    path = write(tmp_path / "rows.jsonl", [row(), row(prompt=[SYSTEM, *TALK])])
    found, _ = read_judgements(path, judged=judged)
    assert [message.role for message in found[1].prompt.messages] == ["system", "user", "assistant", "user"]
    found, report = read_judgements(path, judged=judged, count_tokens=count, max_tokens=5)
    assert len(found) == 1 and report.refused == (2,)
    assert "1 rejected by the chat template or the style; dropped (lines 2)" in report.sentences()
