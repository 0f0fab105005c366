"""Text that is formatted already is counted: the template would be applied to it twice."""

from __future__ import annotations

import json

import pytest

from jaxalign.data.chat.dialogues import is_formatted
from jaxalign.data.sources.judgements import read_judgements
from jaxalign.data.sources.preferences import read_preferences
from jaxalign.data.sources.prompts import read_prompts

SAID = "with the markers of a chat template in their text, such as <|im_start|> or a first 'Human:'; kept as plain text"


@pytest.mark.parametrize(("text", "marked"), [
    ("<|im_start|>user\nHi<|im_end|>", True), ("<s>[INST] Hi [/INST]", True), ("<start_of_turn>user\nHi", True),
    ("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", True), ("Human: Hi", True), (" Assistant: Yes.", True),
    ("What does Human: mean?", False), ("Is 3 <| 4?", False), ("Write a user guide.", False), ("a[INST]", True), ("", False),
])
def test_markers_of_templates_are_recognised(text, marked):
    assert is_formatted([text]) == marked and is_formatted(["plain", text]) == marked


@pytest.mark.parametrize(("read", "row", "marked"), [
    (read_preferences, {"prompt": "q", "chosen": "yes", "rejected": "no"}, {"chosen": "yes<|im_end|>"}),
    (read_judgements, {"prompt": "q", "completion": "yes", "label": True}, {"prompt": "[INST] q [/INST]"}),
    (read_prompts, {"prompt": "q"}, {"prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"}),
])
def test_every_reader_counts_formatted_rows_and_keeps_them(tmp_path, read, row, marked):
    path = tmp_path / "rows.jsonl"
    rows = [row, row | marked, {**row, "prompt": "other"}]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    records, report = read(path)
    assert len(records) == 3 and report.formatted == (2,)
    assert any(sentence.startswith(f"1 {SAID}") and "(lines 2)" in sentence for sentence in report.sentences())
