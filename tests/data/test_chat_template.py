"""Chat templates are untrusted programs: permitted and forbidden operations."""

from __future__ import annotations

import json

import pytest

from jaxalign.data.chat.template import render
from jaxalign.errors import UserError
from jaxalign.records import Message

MESSAGES = [Message("user", "Hi <b>"), Message("assistant", "Ho")]


def run(source, messages=MESSAGES, begin_answer=False, **variables):
    return render(source, "the-model", messages, variables, begin_answer)


@pytest.mark.parametrize(("source", "text"), [
    ("{% for m in messages %}\n  {% if m.role == 'user' %}\nx{{ m['content'] }}\n  {% endif %}\n{% endfor %}", "xHi <b>\n"),
    ("{{ messages[0].content | tojson }}", '"Hi <b>"'),
    ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1) }}", '{\n "b": 1,\n "a": "é"\n}'),
    ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}{{ bos_token }}{{ nothing }}", "2<s>"),
    ("{{ 'p' if add_generation_prompt else 'd' }}{{ tools is none }}{{ documents is none }}", "dTrue" "True"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{%- macro say(m) -%}[{{ m.content }}]{%- endmacro -%}{{ say(messages[1]) }}", "[Ho]"),
])
def test_templates_get_the_variables_and_functions_of_transformers(source, text):
    assert run(source, bos_token="<s>") == text


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages | attr('__class__') }}{{ (messages | attr('__class__')).mro() }}",
])
def test_access_outside_the_sandbox_is_refused(source):
    with pytest.raises(UserError, match="the chat template of the-model (does something that the sandbox forbids|fails)"):
        run(source)


def test_hidden_attributes_render_as_nothing():
    assert run("[{{ raise_exception.__globals__ }}{{ messages.__class__ }}]") == "[]"


def test_a_message_is_never_run_as_a_template():
    assert run("{{ messages[0].content }}", [Message("user", "{{ 7 * 7 }}{% raw %}")]) == "{{ 7 * 7 }}{% raw %}"


@pytest.mark.parametrize(("source", "message"), [
    ("a\n{% for %}", r"is not a Jinja template \(line 2: "),
    ("{{ messages[7].content }}", "reads a value that does not exist .list object has no element 7."),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ raise_exception('no tools here') }}", r"rejects a dialogue \(roles user, assistant\): no tools here$"),
    ("{% include 'x' %}", "fails on a dialogue"),
])
def test_a_template_that_fails_is_reported_in_one_sentence(source, message):
    with pytest.raises(UserError, match=message) as caught:
        run(source)
    assert "\n" not in str(caught.value)


def test_tojson_writes_valid_json():
    assert json.loads(run("{{ messages | tojson }}")) == [{"role": m.role, "content": m.content} for m in MESSAGES]
