"""Prompts with columns from JSONL: every row is a prompt, or is reported."""

import json

import pytest

from jaxalign.data.sources.base import split_by_prompt
from jaxalign.data.sources.prompts import read_prompts
from jaxalign.errors import UserError
from jaxalign.records import Message, Prompt


def written(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def test_texts_and_message_lists_are_prompts_and_other_fields_are_columns(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = written(tmp_path / "sums.jsonl", {"prompt": "1+1", "answer": 2}, {"prompt": turns, "answer": None},
                   {"prompt": "1+1", "answer": 3})
    prompts, report = read_prompts(path)
    dialogue = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert (report.rows, report.prompts, report.broken, report.duplicates) == (3, 2, (), (3,))
    assert prompts == [Prompt("sums:1", (Message("user", "1+1"),), "file", {"answer": 2}),
                       Prompt("sums:2", dialogue, "file", {"answer": None})]
    assert read_prompts(path, limit=1)[0] == prompts[:1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"query": "1+1", "answer": 2}, "no \"prompt\""),
        ({"prompt": "  ", "answer": 2}, "non-empty user turn"),
        ({"prompt": [{"role": "assistant", "content": "b"}], "answer": 2},
         "non-empty user turn"),
        ({"prompt": [{"role": "system", "content": "a"}], "answer": 2}, "non-empty user turn"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "answer": 2}, "message 2"),
        ({"prompt": "1+1"}, "the columns differ from those of the first prompt (answer"),
        ({"prompt": "1+1", "answer": 2, "source": "x"}, '"source" is reserved'),
        ("{", "not JSON"),
    ],
)
def test_an_invalid_row_is_reported_with_its_line(tmp_path, row, reason):
    path = written(tmp_path / "x.jsonl", {"prompt": "0+0", "answer": 0}, row)
    prompts, report = read_prompts(path, max_bad_share=0.5)
    (broken,) = report.broken
    assert len(prompts) == 1 and broken.line == 2 and reason in broken.reason
    with pytest.raises(UserError, match="1 of 2 lines"):
        read_prompts(path)


def test_a_broken_first_row_does_not_define_the_columns(tmp_path):
    path = written(tmp_path / "x.jsonl", {"version": 1}, {"prompt": "1+1", "answer": 2}, {"prompt": "1+2", "answer": 3})
    prompts, report = read_prompts(path, max_bad_share=0.5)
    assert len(prompts) == 2 and [item.line for item in report.broken] == [1]


def test_the_prompt_column_can_have_another_name(tmp_path):
    path = written(tmp_path / "gsm.jsonl", {"question": "How many?", "answer": "so #### 7"})
    (prompt,), _ = read_prompts(path, field="question")
    assert prompt.messages == (Message("user", "How many?"),) and prompt.columns == {"answer": "so #### 7"}
    with pytest.raises(UserError, match='no "problem"'):
        read_prompts(written(tmp_path / "other.jsonl", {"query": "How many?"}), field="problem")


def test_a_file_without_a_prompt_is_refused(tmp_path):
    with pytest.raises(UserError, match='has no prompts; give at least one, such as a row with "prompt"'):
        read_prompts(written(tmp_path / "x.jsonl", ""))


def test_the_split_is_by_content_and_leaves_prompts_on_both_sides():
    prompts = [Prompt(f"x:{i}", (Message("user", str(i)),), "file") for i in range(20)]
    train, held = split_by_prompt(prompts, 0.25, 0)
    assert len(held) == 5 and {*train, *held} == {*prompts}
    again_train, again_held = split_by_prompt(prompts[::-1], 0.25, 0)
    assert {p.id for p in again_held} == {p.id for p in held}
    assert split_by_prompt(prompts, 0.0, 0) == (prompts, [])
    assert split_by_prompt(prompts, 0.25, 1)[1] != held
    with pytest.raises(UserError, match="leaves none of 1 distinct dialogue to train on; set it to 0"):
        split_by_prompt(prompts[:1], 0.9, 0)
