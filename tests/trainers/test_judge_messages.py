"""The messages of `jaxalign.Judge` name its arguments, not config fields."""

from __future__ import annotations

import pytest

import jaxalign as ja
from jaxalign.errors import UserError
from tests.folders import write_model
from tests.trainers.small import language_model

RULES = ["Be brief."]


class Failing:
    def compare(self, requests, draw):
        raise OSError("no connection")


def test_too_many_failed_requests_name_the_argument():
    judge = ja.Judge(Failing(), RULES, retries=0, reasoning=False)
    message = r"no connection\), more than Judge\(max_failed_share\) \(0.05\) allows; fix the cause"
    with pytest.raises(UserError, match=message) as error:
        judge.compare(["Hello"], ["Hi."], ["Good day."])
    assert "config." not in str(error.value) and "stage" not in str(error.value)


def test_a_missing_method_does_not_name_a_config_field():
    with pytest.raises(UserError, match="has no method 'rate', which is needed here; add it, or give another judge$"):
        ja.Judge(Failing(), RULES, reasoning=False).rate(["Hello"], ["Hi."])


@pytest.mark.medium
def test_revise_gives_the_call_for_a_model_without_a_chat_template(tmp_path):
    model = ja.load_model(write_model(tmp_path / "model", template=None, max_length=512))
    for judge, name in ((None, "model"), (model, "judge")):
        with pytest.raises(UserError) as error:
            ja.revise(model, ["Hello"], RULES, judge=judge)
        assert str(error.value).endswith("has no chat template; put chat_template.jinja there, or call revise with "
                                         f"judge=Judge({name}, constitution, templates='transcript')")
    judge = ja.Judge(model, RULES, templates="transcript", max_new_tokens=4)
    (revision,) = ja.revise(model, ["Hello"], judge=judge, max_new_tokens=4)
    assert revision.prompt.messages[-1].content == "Hello"


@pytest.mark.parametrize(("fields", "message"), (
    ({"templates": "chat"}, r"put chat_template.jinja there, or set Judge\(templates\) to 'transcript'"),
    ({"templates": "transcript", "thinking": "off"}, r"Judge\(thinking\) is 'off', but the template set 'transcript'"),
    ({"templates": "transcript", "ties": True}, r"Judge\(ties\) is True, but form.json of the template set 'transcript'"),
    ({"templates": "transcript"}, r"raise load_model\(max_length\)"),
))
def test_a_language_model_that_cannot_judge_names_the_argument(fields, message):
    """The model of 64 tokens has no chat template."""
    with pytest.raises(UserError, match=message) as error:
        ja.Judge(language_model(), RULES, reasoning=False, **fields)
    assert "feedback." not in str(error.value)
