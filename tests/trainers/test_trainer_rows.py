"""The data that callers pass: the accepted forms, and one sentence for each invalid one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxalign.errors import UserError
from jaxalign.records import Comparison, Judgement, Message, Prompt
from jaxalign.trainers.data_frames import without_frame
from jaxalign.trainers.rows import (
    as_answered,
    as_examples,
    as_judgements,
    as_pairs,
    as_prompts,
    is_judged,
)

USER, ANSWER = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
A, B = ({"role": "assistant", "content": text} for text in ("A.", "B."))
ASKED = (Message("user", "Hi."),)


@pytest.mark.parametrize("row", [
    {"prompt": "Hi.", "chosen": "A.", "rejected": "B."},
    {"prompt": [USER], "chosen": "A.", "rejected": "B."},
    {"chosen": [USER, A], "rejected": [USER, B]},
    {"prompt": [USER], "chosen": [A], "rejected": [B]},
    {"instruction": "Hi.", "input": "", "chosen": "A.", "rejected": "B."},
    {"question": "Hi.", "chosen": "A.", "rejected": "B."},
    Comparison(Prompt("p", ASKED, "x"), "A.", "B.", 1.0),
])
def test_every_form_of_a_pair_gives_the_same_pair(row):
    (pair,) = as_pairs([row], "pairs")
    assert (pair.prompt.messages, pair.response_a, pair.response_b, pair.label) == (ASKED, "A.", "B.", 1.0)


def test_columns_are_turned_into_rows():
    found = as_pairs({"prompt": ["Hi."], "chosen": ["A."], "rejected": ["B."], "label": [0.75]}, "pairs")
    assert [(pair.response_a, pair.label) for pair in found] == [("A.", 0.75)]


def test_examples_prompts_and_judgements():
    said = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    examples = as_examples(["text", {"prompt": "Hi.", "response": "A."}, {"messages": [USER, ANSWER]}, {"conversations": said},
                            {"instruction": "Hi.", "input": "", "output": "A."}], "rows")
    assert examples == [(None, "text"), (ASKED, "A."), (ASKED, "Hello."), (ASKED, "Hello."), (ASKED, "A.")]
    prompts = as_prompts(["Hi.", [USER], {"prompt": "Hi.", "answer": 3}, Prompt("p", ASKED, "x")], "prompts")
    assert {prompt.messages for prompt in prompts} == {ASKED} and prompts[2].columns == {"answer": 3}
    rows = [{"prompt": "Hi.", "completion": "A.", "label": True}, Judgement(Prompt("p", ASKED, "x"), "B.", False)]
    assert [one.desirable for one in as_judgements(rows, "rows")] == [True, False]
    assert is_judged(rows) and not is_judged([{"prompt": "", "chosen": "", "rejected": ""}])


def test_a_dialogue_may_begin_with_a_system_message():
    rule, asked = {"role": "system", "content": "Be kind."}, (Message("system", "Be kind."), *ASKED)
    both = [rule, USER]
    assert [p.messages for p in as_prompts([both, {"prompt": both}, list(asked)], "prompts")] == [asked] * 3
    assert as_examples([{"prompt": both, "response": "A."}, {"messages": [*both, ANSWER]}], "rows") == [
        (asked, "A."), (asked, "Hello.")]
    pairs = as_pairs([{"prompt": both, "chosen": "A.", "rejected": "B."}, {"chosen": [*both, A], "rejected": [*both, B]},
                      {"prompt": both, "chosen": [A], "rejected": [B]}], "pairs")
    assert [(pair.prompt.messages, pair.response_a, pair.response_b) for pair in pairs] == [(asked, "A.", "B.")] * 3
    (judged,) = as_judgements([{"prompt": both, "completion": "A.", "label": True}], "rows")
    assert (judged.prompt.messages, judged.response) == (asked, "A.")
    with pytest.raises(UserError, match=r"prompts\[0\]: message 2 is .*'system'"):
        as_prompts([[USER, rule, USER]], "prompts")
    with pytest.raises(UserError, match="ends with the system message"):
        as_prompts([[rule]], "prompts")


class Tensor:
    """Imitates a torch tensor, because these tests do not import torch."""

    dtype, shape = "torch.float32", (3,)

    def __iter__(self):
        return iter(range(3))


PAIR = {"prompt": "Hi.", "chosen": "A.", "rejected": "B."}
RECORD = Comparison(Prompt("x", (Message("user", "Hi."),), "mine"), "A.", "B.", label=1.0)


@pytest.mark.parametrize(("data", "message"), [
    ([], r"DPO.fit\(pairs\) is empty; at least one row is expected, each \{\"prompt\""),
    (Tensor(), r"DPO.fit\(pairs\) is of type .*Tensor; a list of rows is expected"),
    (np.zeros(3), r"DPO.fit\(pairs\) is of type numpy.ndarray; a list of rows is expected"),
    ("text", r"DPO.fit\(pairs\) is of type builtins.str"),
    (3, r"DPO.fit\(pairs\) is of type builtins.int"),
    ([PAIR, {"prompt": "Hi.", "good": "A."}], r"DPO.fit\(pairs\)\[1\] has the keys 'prompt', 'good'; \{\"prompt\""),
    ([PAIR, Tensor()], r"DPO.fit\(pairs\)\[1\] is of type Tensor"),
    ([PAIR | {"label": float("nan")}], r"DPO.fit\(pairs\)\[0\]\['label'\] is nan; a finite number is expected"),
    ([PAIR | {"label": "yes"}], r"\['label'\] is 'yes' .str.; a float is expected"),
    ([PAIR | {"prompt": 3}], r"DPO.fit\(pairs\)\[0\]\['prompt'\] is of type int"),
    ([PAIR | {"prompt": [USER, ANSWER]}],
     r"ends with the assistant message 'Hello.'; a prompt must end with a non-empty user message"),
    ([RECORD, dataclasses.replace(RECORD, response_b="A.")], r"DPO.fit\(pairs\)\[1\] has two equal answers, 'A.'"),
    ([dataclasses.replace(RECORD, label=float("nan"))], r"DPO.fit\(pairs\)\[0\] has the label nan; the probability in"),
    ({"prompt": ["Hi."], "chosen": ["A.", "C."], "rejected": ["B."]},
     r"the columns of DPO.fit\(pairs\) differ in length: prompt has 1, chosen has 2, rejected has 1"),
    ({"prompt": "Hi.", "chosen": "A.", "rejected": "B."}, r"is a mapping whose 'prompt' is of type str; give a list of rows"),
])
def test_invalid_data_is_refused_with_a_sentence(data, message):
    with pytest.raises(UserError, match=message):
        as_pairs(data, "DPO.fit(pairs)")


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(UserError, match="RewardModel.score received lists of unequal length: prompts has 2, responses has 1"):
        as_answered(["a", "b"], "RewardModel.score", responses=["c"])


class Indexed:
    """A length and an index only, as PyTorch's data sets have."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_a_data_set_with_a_length_and_an_index_is_read_like_a_list():
    judged = [{"prompt": f"q{i}", "completion": "yes", "label": i % 2 == 0} for i in range(3)]
    pairs = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(3)]
    kinds = [Indexed, pytest.importorskip("datasets").Dataset.from_list]
    for kind in kinds:
        assert is_judged(kind(judged)) and not is_judged(kind(pairs))
        assert as_pairs(kind(pairs), "pairs") == as_pairs(pairs, "pairs")
        assert as_judgements(kind(judged), "pairs") == as_judgements(judged, "pairs")


def test_the_rows_of_a_data_frame_are_read_and_not_the_names_of_its_columns():
    frame = pytest.importorskip("pandas").DataFrame
    examples = [{"prompt": "Hi.", "response": "A."}, {"prompt": "Ho.", "response": "B."}]
    assert as_examples(frame(examples), "rows") == as_examples(examples, "rows")
    assert as_prompts(frame([{"prompt": "Hi.", "gold": 3}]), "prompts") == as_prompts([{"prompt": "Hi.", "gold": 3}], "prompts")
    judged = [{"prompt": "Hi.", "completion": "A.", "label": True}, {"prompt": "Hi.", "completion": "B.", "label": False}]
    assert as_judgements(frame(judged), "rows") == as_judgements(judged, "rows")
    messages = frame({"messages": [np.array([USER, ANSWER], dtype=object)]})  # As pandas reads them from a Parquet file.
    assert as_examples(messages, "rows") == [(ASKED, "Hello.")]
    assert [without_frame(frame(judged))[1], without_frame(judged)] == [judged[1], judged]
    asked = {"role": "user", "content": np.array([{"type": "text", "text": "Hi."}], dtype=object)}
    assert as_examples(frame({"messages": [np.array([asked, ANSWER], dtype=object)]}), "rows")[0][1] == "Hello."
    mixed = [{"messages": [USER, ANSWER]}, {"text": "A text."}]  # Cells that a row lacks are NaN.
    assert as_examples(frame(mixed), "rows") == as_examples(mixed, "rows")
    with pytest.raises(UserError, match=r"rows\[1\] has the keys 'prompt'; a string, .* is expected"):
        as_examples(frame([examples[0], {"prompt": "Ho.", "response": float("nan")}]), "rows")


def test_an_answer_may_be_messages_of_the_assistant():
    expected = [(ASKED, "Hello.")]
    assert as_examples([{"prompt": [USER], "completion": [ANSWER]}], "rows") == expected
    assert as_examples([{"prompt": "Hi.", "completion": [ANSWER]}], "rows") == expected
    with pytest.raises(UserError, match=r"rows\[0\]: the completion does not begin and end with the assistant's turn"):
        as_examples([{"prompt": "Hi.", "completion": [USER]}], "rows")


def test_a_verdict_may_be_a_bool_or_a_number_also_of_numpy():
    row = {"prompt": "Hi.", "completion": "A."}
    labels = [True, False, np.bool_(True), np.bool_(False), 1, 0, np.int64(1), np.int64(0), 1.0, np.float64(0)]
    found = [judged.desirable for judged in as_judgements([row | {"label": label} for label in labels], "rows")]
    assert found == [True, False] * 5 and {type(value) for value in found} == {bool}
    for label in (2, -1, 0.5, float("nan"), "1", None, [1], np.ones(1)):
        with pytest.raises(UserError, match=r"rows\[0\]: label is '.*'; true or false, or 1 or 0, is expected"):
            as_judgements([row | {"label": label}], "rows")


def test_a_prompt_of_none_is_named():
    with pytest.raises(UserError, match=r"rows\[0\] has the keys 'prompt' \(None\), 'response'; a string"):
        as_examples([{"prompt": None, "response": "A."}], "rows")


def test_messages_of_the_wrong_type_are_named():
    with pytest.raises(UserError, match=r"rows\[0\]\['messages'\]: type NoneType; a transcript or a list of messages"):
        as_examples([{"messages": None}], "rows")


def test_tools_that_are_not_read_are_told(caplog):
    rows = [{"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, {"prompt": "Hi.", "response": "A.", "tools": None}, "Text."]
    as_examples(rows, "rows")
    assert [record.getMessage() for record in caplog.records] == [
        "rows: 1 of 3 rows have 'tools', which is not read; chat templates are rendered without tools"]


def test_a_text_in_system_is_the_system_message():
    system, asked = Message("system", "Be kind."), Message("user", "Hi.")
    row = {"system": "Be kind.", "prompt": "Hi."}
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "A."}]
    examples = [row | {"response": "A."}, {"system": "Be kind.", "messages": messages},
                {"system": "Be kind.", "question": "Hi.", "answer": "A."}]
    assert [example for example, _ in as_examples(examples, "rows")] == [(system, asked)] * 3
    assert as_pairs([row | {"chosen": "A.", "rejected": "B."}], "rows")[0].prompt.messages == (system, asked)
    assert as_judgements([row | {"response": "A.", "label": True}], "rows")[0].prompt.messages == (system, asked)
    prompt = as_prompts([row], "rows")[0]
    assert prompt.messages == (system, asked) and prompt.columns == {"system": "Be kind."}
