"""Template sets of a user's own: the messages that they write, and malformed files."""

from __future__ import annotations

import json
import re

import pytest

from jaxalign.data.chat.requests import KINDS, RenderedRequest, load_set, set_files, set_names
from jaxalign.data.chat.template import DialogueRefused
from jaxalign.errors import UserError
from jaxalign.feedback.contract import read_contract
from jaxalign.records import Message, Principle

PRINCIPLE = Principle("kind", "Where is it rude?", "Make it polite.", "Which is kinder?")
DIALOGUE = (Message("user", "Why?"),)
CRITIQUE = ('{% message "user" %}{{ dialogue[-1].content }} {{ response }} {{ principle.critique_request }}{% endmessage %}\n'
            "{% answer %}{% endanswer %}\n")
COMPARISON = ('{% message "user" %}{{ dialogue[0].content }} {{ first }} {{ second }} {{ principle.comparison }}'
              "{% endmessage %}{% answer %}{% endanswer %}")


def write(folder, form=None, exemplars=None, **templates):
    folder.mkdir(exist_ok=True)
    if form is not False:
        (folder / "form.json").write_text(form if isinstance(form, str) else json.dumps(form or {"layout": "chat"}))
    if exemplars is not None:
        (folder / "exemplars.json").write_text(exemplars)
    for kind, text in templates.items():
        (folder / f"{kind}.jinja").write_text(text)
    return str(folder)


def ask(folder, text, response="Go away!", **values):
    return load_set(write(folder, critique=text)).render("critique", DIALOGUE, PRINCIPLE, response=response, **values)


def test_a_set_in_a_folder_writes_messages_and_the_beginning_of_the_answer(tmp_path):
    text = ('{% message "system" %}Judge.{% endmessage %}\n{% for turn in dialogue %}\n{% message turn.role %}'
            "{{ turn.content }}{% endmessage %}\n{% endfor %}\n{% message 'user' %}\nAnswer: {{ response }}\n"
            "{{ principle.critique_request }}\n{%- endmessage %}\n{% answer %}It is{% endanswer %}\n")
    assert ask(tmp_path, text) == RenderedRequest(
        (Message("system", "Judge."), Message("user", "Why?"), Message("user", "Answer: Go away!\nWhere is it rude?")),
        "assistant", "It is")
    assert [path.name for path in set_files(str(tmp_path))] == ["critique.jinja", "form.json"]


def test_a_template_may_use_jinjas_functions_and_refuse_a_dialogue(tmp_path):
    text = ("{% set seen = namespace(turns=0) %}{% for i in range(2) %}{% set seen.turns = seen.turns + 1 %}{% endfor %}"
            "{% if response == 'no' %}{{ raise_exception('an answer is needed') }}{% endif %}"
            + CRITIQUE.replace("{{ response }}", "{{ response }} {{ seen.turns }}"))
    assert ask(tmp_path, text).messages[0].content == "Why? Go away! 2 Where is it rude?"
    with pytest.raises(DialogueRefused, match=r"critique.jinja of the template set .* rejects a request: an answer is needed"):
        ask(tmp_path, text, "no")


def test_values_are_data(tmp_path):
    """Template syntax in a prompt or an answer is not interpreted, and closes no block."""
    said = "{{ 7*7 }} {% raw %}{% endmessage %}{% answer %} {# no #}"
    assert ask(tmp_path, CRITIQUE, said).messages == (Message("user", f"Why? {said} Where is it rude?"),)


@pytest.mark.parametrize(("text", "message"), [
    (CRITIQUE.replace("response", "respons"), "has the variable 'respons'; it must be one of .*; did you mean response?"),
    (CRITIQUE + "{{ xyzzy }}", r"has the variable 'xyzzy'; it must be one of dialogue, response, principle, exemplars$"),
    (CRITIQUE.replace("{{ response }}", ""), r"does not contain \{\{ response \}\}, which the judge needs; add it"),
    (CRITIQUE.replace("{{ response }}", "{% if response == 'x' %}{{ response }}{% endif %}"),
     r"does not show \{\{ response \}\} in every request; write it outside of conditions"),
    ("Judge this. " + CRITIQUE, "writes 'Judge this.' outside of a message block; put it between"),
    (CRITIQUE.split("{% answer")[0], r"must end with one \{% answer %\} block, where the judge's text begins; add it"),
    ("{% answer %}{% endanswer %}" + CRITIQUE, r"must end with one \{% answer %\} block"),
    ("{% answer %}{% endanswer %}" + CRITIQUE.split("{% answer")[0], r"must end with one \{% answer %\} block"),
    (CRITIQUE.replace("{% endmessage %}", ""), r"is not a Jinja template \(line \d: .*\); fix it"),
    ('{% message %}' + CRITIQUE, r"is not a Jinja template \(line 1: "),
    (CRITIQUE.replace("principle.critique_request", "principle.critique"), "reads a value that does not exist"),
    ("{% for example in exemplars %}{{ example.answer }}{% endfor %}" + CRITIQUE, "reads a value that does not exist"),
    ("{% message 'user' %}{{ response.__class__ }}{% endmessage %}" + CRITIQUE, "does something that the sandbox forbids"),
])
def test_a_malformed_template_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(UserError, match=f"^critique.jinja of the template set .*{message}"):
        load_set(write(tmp_path, critique=text))


def test_a_comparison_must_show_both_answers(tmp_path):
    load_set(write(tmp_path, comparison=COMPARISON))
    with pytest.raises(UserError, match=r"comparison.jinja of .* does not contain \{\{ second \}\}, which the judge needs"):
        load_set(write(tmp_path, comparison=COMPARISON.replace("{{ second }}", "")))
    with pytest.raises(UserError, match=r"does not show \{\{ second \}\} in every request"):
        load_set(write(tmp_path, comparison=COMPARISON.replace("{{ second }}", "{{ second | length }}")))
    with pytest.raises(UserError, match=r"does not show \{\{ second \}\} in every request"):  # only before the reasoning
        shown = "{% if not reasoning %}{{ second }}{% endif %}"
        load_set(write(tmp_path, comparison=COMPARISON.replace("{{ second }}", shown)))
    with pytest.raises(UserError, match=r"does not show \{\{ thoughts \}\}"):
        load_set(write(tmp_path, comparison=COMPARISON + "{% if thoughts %}{% endif %}"))


def test_a_request_of_a_kind_without_a_template_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the template set .* has no rating.jinja, which the judge needs; add it"):
        load_set(write(tmp_path, critique=CRITIQUE)).render("rating", DIALOGUE, PRINCIPLE, response="so")


@pytest.mark.parametrize(("form", "message"), [
    (False, "has no form.json; add one with at least"),
    ("{", "form.json of the template set .* is not JSON"),
    ("[]", "form.json of the template set .* is a list; an object is expected"),
    ("{}", '"layout" in form.json of .* is None; it must be one of chat, transcript, markers'),
    ({"layout": "Chat"}, "is 'Chat'; it must be one of"),
    ({"layout": "chat", "exemplars": -1}, '"exemplars" in form.json of .* is -1; it must be at least 0'),
    ({"layout": "chat", "exemplars": True}, "is True; it must be at least 0"),
])
def test_a_malformed_form_is_refused_in_one_sentence(tmp_path, form, message):
    with pytest.raises(UserError, match=message):
        load_set(write(tmp_path / "set", form))


@pytest.mark.parametrize(("form", "message"), [
    ({"option": ["A", "B"]}, 'form.json of set has the field "option"; it must be one of layout, exemplars, .*options'),
    ({"options": ["A"]}, '"options" in form.json of set is .*; a list of 2 strings with text is expected'),
    ({"options": ["A", "A"]}, r"is \['A', 'A'\]; distinct strings are expected"),
    ({"options": ["A", ""]}, "a list of 2 strings with text is expected"),
    ({"ratings": ["1", "2"]}, "a list of 10 strings with text is expected"),
    ({"stops": [""]}, "a list of strings with text is expected"),
    ({"thinking": ["", "</think>"]}, "a list of 2 strings with text is expected"),
    ({"thinking": None}, "a list of 2 strings with text is expected"),
    ({"preambles": ["here ("]}, r'"preambles" in form.json of set has a malformed regular expression \(.*\); correct it'),
    ({"refusals": {"verdict": ["("]}}, '"refusals.verdict" in form.json of set has a malformed regular expression'),
    ({"refusals": {"verdicts": []}}, "an object with some of critique, revision, verdict is expected"),
    ({"refusals": ["no"]}, "an object with some of critique, revision, verdict is expected"),
    ({"verdict": 1}, '"verdict" in form.json of set is 1; a string is expected'),
    ({"ended": "yes"}, "\"ended\" in form.json of set is 'yes'; true or false is expected"),
])
def test_a_malformed_field_of_a_form_is_refused_in_one_sentence(form, message):
    with pytest.raises(UserError, match=message):
        read_contract(form, "set")


@pytest.mark.parametrize(("exemplars", "message"), [
    ("{", "exemplars.json of the template set .* is not JSON"),
    ("[]", 'exemplars.json of the template set .* has no "system_chat"'),
    ('{"system_chat": [[{"role": "user", "content": "a"}]]}', 'chat 1 in "system_chat" of the template set .* six messages'),
])
def test_malformed_examples_are_refused_in_one_sentence(tmp_path, exemplars, message):
    with pytest.raises(UserError, match=message):
        load_set(write(tmp_path, exemplars=exemplars, critique=CRITIQUE))


def test_a_folder_that_does_not_exist_and_a_file_that_is_not_text_are_refused(tmp_path):
    with pytest.raises(UserError, match="the template set chatt does not exist; give a folder, or one of: chat, tr"):
        load_set("chatt")
    write(tmp_path, critique="")
    (tmp_path / "critique.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"a template of the set .* cannot be read as text .*; save it as UTF-8"):
        load_set(str(tmp_path))


def test_every_set_of_the_package_can_ask_every_request_and_its_form_is_read():
    assert set_names() == ("chat", "transcript", "world")
    for name in set_names():
        templates = load_set(name)
        assert set(templates.sources) == set(KINDS)
        contract = read_contract(templates.form, name)
        assert contract.ratings == tuple("1 2 3 4 5 6 7 8 9 10".split())
        assert [re.sub("[()]", "", option) for option in contract.options] == ["A", "B"]
