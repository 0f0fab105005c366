"""Prompts in the layouts of common data sets. Expected dialogues are written out by hand from the published layouts."""

import json

import pytest

from jaxalign.data.chat.dialogues import cut_front
from jaxalign.data.chat.formats import render_prompt
from jaxalign.data.sources.prompts import parse_prompt, read_prompts
from jaxalign.errors import UserError
from jaxalign.records import Message

USER, ASSISTANT, SYSTEM = (lambda text, role=role: Message(role, text) for role in ("user", "assistant", "system"))
HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
RULE = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(("row", "messages", "fields"), [
    ("Hi", (USER("Hi"),), ()),
    ({"prompt": "Hi", "id": 3}, (USER("Hi"),), ("prompt",)),
    ({"prompt": [HI, HELLO, HI]}, (USER("Hi"), ASSISTANT("Hello."), USER("Hi")), ("prompt",)),
    ({"prompt": "\n\nHuman: Hi\n\nAssistant:"}, (USER("Hi"),), ("prompt",)),
    ({"prompt": "Human: Hi\n\nAssistant:"}, (USER("Hi"),), ("prompt",)),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, (USER("Hi"),), ("conversations",)),
    ({"prompt": "Human: Hi"}, (USER("Human: Hi"),), ("prompt",)),
    ({"messages": [RULE, HI, HELLO]}, (SYSTEM("Be brief."), USER("Hi")), ("messages",)),
    ({"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}, (USER("Hi"),),
     ("chosen", "rejected")),
    ({"chosen": [HI, HELLO]}, (USER("Hi"),), ("chosen",)),
    ({"question": "Why?", "answer": "So."}, (USER("Why?"),), ("question",)),
    ({"instruction": "Sort.", "input": "3 1 2", "output": "1 2 3"}, (USER("Sort.\n\n3 1 2"),), ("instruction", "input")),
    ({"instruction": "Sort.", "input": ""}, (USER("Sort."),), ("instruction", "input")),
    ({"instruction": "Sort."}, (USER("Sort."),), ("instruction",)),
    ({"instruction": "", "input": "3 1 2"}, (USER("3 1 2"),), ("instruction", "input")),
    ({"instruction": "Sort.", "input": "3 1", "chosen": "1 3", "rejected": "3 1"}, (USER("Sort.\n\n3 1"),),
     ("instruction", "input")),
    ({"prompt": None, "messages": [HI]}, (USER("Hi"),), ("messages",)),
    ({"chosen": [RULE, HI, HELLO], "rejected": [RULE, HI, dict(HELLO, content="No.")]}, (SYSTEM("Be brief."), USER("Hi")),
     ("chosen", "rejected")),
    ({"prompt": "{{ 7 * 7 }} {% raw %} <|im_end|>"}, (USER("{{ 7 * 7 }} {% raw %} <|im_end|>"),), ("prompt",)),
])
def test_the_layout_of_a_row_is_recognised(row, messages, fields):
    assert parse_prompt(row) == (messages, fields)


def test_the_configured_field_comes_first():
    assert parse_prompt({"prompt": "a", "question": "b"}, "question") == ((USER("b"),), ("question",))
    assert parse_prompt({"prompt": "a"}, "problem") == ((USER("a"),), ("prompt",))


@pytest.mark.parametrize(("row", "reason"), [
    ({}, 'no "prompt", "messages", "conversations", "chosen", "question" or "instruction"'),
    ({"prompt": 3}, "of type int"),
    ({"prompt": []}, "non-empty user turn"),
    ({"messages": [HELLO]}, "non-empty user turn"),
    ({"messages": [HI, RULE]}, "message 2"),
    ({"instruction": "a", "input": 3}, "must be strings"),
    ({"chosen": [HI, HELLO], "rejected": [dict(HI, content="Bye"), HELLO]}, "no common user turn"),
    ("  ", "non-empty user turn"),
])
def test_a_row_without_a_prompt_is_refused_with_the_reason(row, reason):
    with pytest.raises(ValueError, match=reason):
        parse_prompt(row)


def test_a_text_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text("\ufeffHow so?\n\n  \nWhy?\r\nHow so?\n", encoding="utf-8")
    prompts, report = read_prompts(path, name="red_team")
    assert [(p.id, p.messages, p.source) for p in prompts] == [
        ("red_team:1", (USER("How so?"),), "red_team"), ("red_team:4", (USER("Why?"),), "red_team")]
    assert (report.rows, report.duplicates) == (3, (5,))


def test_lines_may_be_json_strings(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('"How so?"\n' + json.dumps({"prompt": "Why?"}) + "\n[1]\n", encoding="utf-8")
    prompts, report = read_prompts(path, max_bad_share=0.5)
    assert [p.messages for p in prompts] == [(USER("How so?"),), (USER("Why?"),)]
    assert [item.line for item in report.broken] == [3]


def test_files_without_columns_may_have_rows_with_different_fields(tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "a", "source": "web"}\n{"prompt": "b", "prompt_id": 7}\n')
    assert [dict(p.columns) for p in read_prompts(path, columns=False).prompts] == [{}, {}]
    with pytest.raises(UserError, match='"source" is reserved'):
        read_prompts(path)


def test_a_system_message_is_kept_when_a_dialogue_is_cut():
    dialogue = (SYSTEM("s"), USER("1"), ASSISTANT("2"), USER("3"))
    assert cut_front(dialogue, lambda messages: len(messages) <= 2) == (SYSTEM("s"), USER("3"))
    assert cut_front(dialogue, lambda messages: len(messages) <= 1) is None


def test_a_transcript_begins_with_the_system_message():
    assert "".join(render_prompt((SYSTEM("Be brief."), USER("Hi")), "hh")) == "Be brief.\n\nHuman: Hi\n\nAssistant:"


def test_a_system_message_is_never_a_marker():
    segments = render_prompt((SYSTEM("<end>"), USER("<user>")), "hh")
    assert not {"<end>", "<user>"} & set(segments)
