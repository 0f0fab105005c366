"""The preview shows the requests that a stage's judge will read, and what they lose."""

from __future__ import annotations

import json

import pytest

from jaxalign.config import from_config_dict
from jaxalign.data.chat import encoding as chat
from jaxalign.data.chat.model_style import resolve_auto
from jaxalign.data.tokenizers.load import load_tokenizer
from jaxalign.errors import UserError
from jaxalign.feedback.constitution import load_constitution
from jaxalign.pipeline import run
from jaxalign.records import Message
from jaxalign.stages.shared import preview
from jaxalign.stages.shared.base import StageContext
from tests.folders import write_model

LONG = {"judge_section": {"max_length": 1000}}
RULES = {rule.name: rule for rule in load_constitution("default")}
JUDGE = '''
import json
import pathlib


class Judge:
    def _record(self, requests, result):
        with pathlib.Path(__file__).with_name("asked.jsonl").open("a") as file:
            for request in requests:
                asked = [type(request).__name__, request.messages[-1].content, request.principle.name]
                file.write(json.dumps(asked) + "\\n")
        return [result] * len(requests)

    def critique(self, requests, draw):
        return self._record(requests, "Bad.")

    def revise(self, requests, draw):
        return self._record(requests, "Better.")

    def compare(self, requests, draw):
        return self._record(requests, 0.9)

    def rate(self, requests, draw):
        return self._record(requests, 5)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("previewed")
    write_model(root / "model", max_length=4000)
    (root / "red.txt").write_text("Why did it sit there?\nWhat is 2 + 2?\nWho barked?\n")
    (root / "chat.jsonl").write_text(json.dumps({"prompt": [
        {"role": role, "content": "It sat on the mat. " * 3} for role in ("user", "assistant", "user", "assistant", "user")
    ]}))
    (root / "judge.py").write_text(JUDGE)
    return root


def context(folder, judge="local", feedback=None, judge_section=None, **changes):
    values = {
        "stages": ("revise", "compare"), "model": {"source": "huggingface", "path": str(folder / "model"), "max_length": 128},
        "data": {"source": "prompts_jsonl", "red_team": str(folder / "red.txt"), "held_out_share": 0.0},
        "feedback": {"judge": judge} | (feedback or {}), "preference": {"max_length": 128}, "compile_cache": None,
        "judge": judge_section or {}, "sft": {"row_length": 128},
        "revise": {"red_team_prompts": 3, "helpful_prompts": 0, "rounds": 2, "max_new_tokens": 8, "batch": 4},
        "compare": {"prompts": 3, "max_new_tokens": 8, "batch": 4}, "ppo": {"max_new_tokens": 8},
    }
    for section, fields in changes.items():
        values[section] = values.get(section, {}) | fields if isinstance(fields, dict) else fields
    return StageContext(resolve_auto(from_config_dict(values)), folder / "run", folder / "run" / "x", False)


def rows(made, stage, count=3):
    return preview.rows(made, stage, count)[1]


def principle(row):
    return next(RULES[name] for name in RULES if f"principle {name}" in row.notes)


def test_a_judge_of_ones_own_will_get_the_requests_that_are_shown(folder):
    made = context(folder, f"{folder / 'judge.py'}:Judge")
    shown = [row for stage in ("revise", "compare") for row in rows(made, stage) if not row.ids]

    def field(row, name):
        return next(line.split(": ", 1)[1] for line in row.lines if line.startswith(f"  {name}: "))

    run(made.config, folder / "run")
    asked = [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]
    assert len(shown) == 3 * 2 + 3
    for row in shown:
        request = [row.notes[0], field(row, "messages").removeprefix("user: "), field(row, "principle.name")]
        assert request in asked
    assert {field(row, "response") for row in shown if row.notes[0] == "CritiqueRequest"} == {"[the answer]"}
    first, second = (next(row for row in shown if row.notes[0] == kind) for kind in ("RevisionRequest", "ComparisonRequest"))
    assert field(first, "critique") == "[the critique]"
    assert (field(second, "first"), field(second, "second")) == ("[answer A]", "[answer B]")


def test_a_chat_model_reads_the_critique_and_the_revision_in_its_template(folder):
    found = rows(context(folder, **LONG), "revise", 1)
    tokenizer = load_tokenizer(folder / "model")
    assert [row.title for row in found] == ["revise 1", "revise 1, critique", "revise 1, revision"]
    rule = principle(found[1])
    turns = [
        Message("user", "Why did it sit there?"), Message("assistant", "[the answer]"),
        Message("user", f"{rule.critique_request}\n\nWrite only this critique of your last answer, in a few sentences."),
        Message("assistant", "[the critique]"),
        Message("user", f"{rule.revision_request}\n\nWrite only the new answer, without an introduction or a comment."),
    ]
    assert [row.ids for row in found[1:]] == [chat.encode_prompt(tokenizer, turns[:n]) for n in (3, 5)]
    assert f"leaves {1000 - len(found[1].ids)} of 1000 tokens, the judge writes up to 8" in found[1].notes
    assert found[2].lines[0].startswith("principles of the next rounds: ")


def test_the_options_of_a_verdict_are_listed_with_their_ids(folder):
    _, verdict = rows(context(folder, **LONG), "compare", 1)
    tokenizer = load_tokenizer(folder / "model")
    (a,), (b,) = tokenizer.encode("A"), tokenizer.encode("B")
    assert verdict.title == "compare 1, verdict"
    assert verdict.lines[0].startswith(f"options: A: A ({a}) or ") and f"; B: B ({b}) or " in verdict.lines[0]


def test_a_judge_that_reasons_reads_a_comparison_twice(folder):
    tokenizer = load_tokenizer(folder / "model")
    _, first, second = rows(context(folder, feedback={"reasoning": True, "max_reasoning_tokens": 30}, **LONG), "compare", 1)
    assert second.ids[: len(first.ids)] == first.ids and first.notes[1].endswith("the judge writes up to 30")
    assert second.ids[len(first.ids) :] == tokenizer.encode("[the reasoning]\n\nBetter answer:", continues=True)


def test_notes_say_what_a_request_loses(folder):
    def request(length, number=1):
        made = context(
            folder, feedback={"templates": "transcript"}, data={"red_team": str(folder / "chat.jsonl")},
            revise={"rounds": 1, "max_new_tokens": 16}, judge_section={"max_length": length},
        )
        return rows(made, "revise", 1)[number]

    def notes(length, number=1):
        return ", ".join(request(length, number).notes)

    fitting = len(request(4000).ids) + 16
    assert "examples" not in notes(4000)
    assert "1 of 2 examples shown" in notes(fitting - 1)
    assert "0 of 2 examples shown, loses 2 oldest turns" in notes(160)
    assert "not asked: even without examples and earlier turns it leaves no space for 16 tokens" in notes(112, 2)
    # An answer has up to 16 tokens, and its placeholder 9.
    assert "maximum length: 1 of 2 examples shown" in notes(fitting + 6) and "maximum" not in notes(fitting + 7)


def test_ratings_are_shown_for_the_first_rows_of_the_first_iteration(folder):
    made = context(folder, reward={"source": "ai_feedback"}, stages=("ppo",), ppo={"batch": 4, "minibatches": 1}, **LONG)
    found = rows(made, "rate", 2)
    assert [row.title for row in found] == ["ppo 1", "rate 1, verdict", "ppo 2", "rate 2, verdict"]
    assert found[1].lines[0].startswith("options: 1: 1 (") and "; 10: " in found[1].lines[0]
    with pytest.raises(UserError, match="--stage=rate shows the requests of the reward 'ai_feedback', but"):
        rows(context(folder), "rate")


def test_each_member_of_a_jury_is_shown(folder):
    path = (str(folder / "model"), str(folder / "model"))
    made = context(folder, judge="model", judge_section={"path": path})
    titles = [row.title for row in rows(made, "compare", 1)]
    assert titles == ["compare 1", "compare 1, verdict by member 1", "compare 1, verdict by member 2"]
