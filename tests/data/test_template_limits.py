"""Hostile templates end in one sentence, within limits of time and memory, and the next template is rendered."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxalign.data.chat import template
from jaxalign.data.chat.requests import load_set
from jaxalign.data.chat.template import render
from jaxalign.errors import UserError
from jaxalign.records import Message

MESSAGES = [Message("user", "Hi"), Message("assistant", "Ho")]
MANY = "{% for i in range(99999) %}"
DOUBLE = ("{{% set n = namespace(x={}) %}}{{% for i in range(99) %}}{{% set n.x = n.x {} n.x %}}{{% endfor %}}"
          "{{{{ n.x | length }}}}")
# (template, the limit: of time, memory, output or depth)
HOSTILE = {
    "loops": (MANY * 3 + "{% endfor %}" * 3, "2 s of processor time"),
    "loops that write": (MANY * 2 + "x{% endfor %}" * 2, "memory|16000000 bytes|processor time"),
    "squares": ("{% set n = namespace(x=7) %}" + MANY + "{% set n.x = n.x * n.x %}{% endfor %}", "processor time"),
    "sum of lists": ("{{ ([[1]] * 999999) | sum(start=[]) | length }}", "processor time"),
    "powers": ("{{ 9 ** (9 ** 9) % 7 }}", "2 s of processor time|memory"),
    "chained powers": ("{{ (((10 ** 60) ** 60) ** 60) ** 60 }}", "."),
    "powers of floats": ("{{ 9.0 ** 9999 }}", "limit"),
    "doubling by ~": (DOUBLE.format("'xx'", "~"), "512 MB of memory"),
    "doubling by +": (DOUBLE.format("'xx'", "+"), "512 MB of memory"),
    "doubling lists": (DOUBLE.format("[0]", "+"), "512 MB of memory"),
    "doubling tuples": (DOUBLE.format("(0,)", "+"), "512 MB of memory"),
    "repeated text": ("{{ 'x' * 10**9 }}", "512 MB of memory"),
    "repeated tuples": ("{{ ((1, 2) * 10**9) | length }}", "512 MB of memory"),
    "percent": ("{{ '%2000000000d' % 1 }}", "512 MB of memory"),
    "percent star": ("{{ '%*d' % (2000000000, 1) }}", "512 MB of memory"),
    "format filter": ("{{ '%2000000000s' | format('x') }}", "512 MB of memory"),
    "format": ("{{ '{:>2000000000}'.format('x') }}", "512 MB of memory"),
    "ljust": ("{{ 'x'.ljust(2000000000) }}", "512 MB of memory"),
    "zfill": ("{{ 'x'.zfill(2000000000) }}", "512 MB of memory"),
    "expandtabs": ("{{ '\t'.expandtabs(2000000000) }}", "512 MB of memory"),
    "center": ("{{ 'x' | center(2000000000) }}", "512 MB of memory"),
    "indent": ("{{ 'x\nx' | indent(2000000000) }}", "512 MB of memory"),
    "tojson": ("{{ messages | tojson(indent=10**9) }}", "512 MB of memory"),
    "replace": ("{% set n = namespace(x='x') %}" + MANY +
                "{% set n.x = n.x | replace('x', 'xxxx') %}{% endfor %}", "memory|time"),
    "join": ("{{ range(99999) | join('x' * 99999) }}", "512 MB of memory"),
    "batch": ("{{ [1] | batch(10**9, 0) | list | length }}", "512 MB of memory"),
    "slice": ("{{ [1] | slice(10**9, 0) | list | length }}", "512 MB of memory|processor time"),
    "wordwrap": ("{{ ('x ' * 9999999) | wordwrap(1) | length }}", "memory|processor time"),
    "lipsum": ("{{ lipsum(n=10**9) }}", "memory|processor time"),
    "groupby": (MANY + "{{ range(99999) | groupby('real') | length }}{% endfor %}", "memory|processor time"),
    "sorting": (MANY + "{{ range(99999) | map('string') | sort | length }}{% endfor %}", "processor time"),
    "cycler": ("{{ cycler(*([0] * 10**9)) }}", "512 MB of memory"),
    "recursive macros": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "limit"),
    "macros that call twice": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
                               "processor time"),
    "recursive loops": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "limit"),
    "digits": ("{{ '9' * 4000 | int }}{{ 10 ** 4999 }}", "."),
    "output of 20 MB": ("{{ 'x' * 20000000 }}", "writes more than 16000000 bytes"),
    "constants of 300 MB": ("{{ 'x' | center(300000000) | length }}{{ 'y' | center(300000000) }}", "memory|16000000 bytes"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "."),
    "deep lists": ("{{ " + "[" * 90 + "]" * 90 + " }}" + "{% if 1 %}" * 300 + "{% endif %}" * 300, "."),
    "long messages": ("{{ raise_exception('x\n' * 9999999) }}", "rejects a dialogue .*: x x x"),
    "large types of errors": ("{{ {}['x' * 9999999].y }}", "reads a value that does not exist|fails on"),
    "classes": ("{{ messages.__class__.__mro__ }}", "forbids|does not exist|fails"),
    "unpaired surrogates": ("{{ '\ud800' * 10**9 }}", "."),
    "half of a surrogate pair": ("{{ '\ud800' }}", "writes half of a surrogate pair"),
}


def run(source, messages=MESSAGES):
    return render(source, "the-model", messages, {}, False)


@pytest.fixture
def short(monkeypatch):
    """Allow half a second of processor time instead of two."""
    template._PROCESS.stop()
    program = "import sys; sys.path += sys.argv[1:]; import sandbox; sandbox.MAX_SECONDS = 0.5; sandbox.serve()"
    monkeypatch.setattr(template, "_PROGRAM", program)
    yield
    template._PROCESS.stop()


@pytest.mark.process
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_sentence(name, request):
    """Only "loops" uses up the processor time that users have; the others that may take as much are allowed less of it."""
    source, limit = HOSTILE[name]
    if "time" in limit and name != "loops" or name == "chained powers":
        request.getfixturevalue("short")
    start = time.monotonic()
    with pytest.raises(UserError, match=limit) as caught:
        run(source)
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith("the chat template of the-model ")
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert run("{{ messages[1].content }}") == "Ho"
    assert resource.prlimit(template._PROCESS._child.pid, resource.RLIMIT_AS)[0] == 512 * 1024**2


def test_a_condition_on_messages_does_not_escape_the_limits():
    source = "{% if messages[0].content == 'now' %}{{ 'x'.ljust(10**10) }}{% endif %}good"
    assert run(source) == "good"
    with pytest.raises(UserError, match="512 MB of memory"):
        run(source, [Message("user", "now")])
    assert run(source) == "good"


@pytest.mark.process
@pytest.mark.parametrize("text", ["{{ 'x'.ljust(10**10) }}", MANY * 3 + "{% endfor %}" * 3])
@pytest.mark.parametrize("inside", [True, False])
def test_the_limits_hold_for_a_template_set_of_a_users_own(tmp_path, text, inside, short):
    (tmp_path / "form.json").write_text('{"layout": "chat"}')
    shown, begin = "{{ dialogue[0].content }}{{ response }}{{ principle.critique_request }}", "{% message 'user' %}"
    text = (begin + text if inside else text + begin) + shown + "{% endmessage %}"
    (tmp_path / "critique.jinja").write_text(text + "{% answer %}{% endanswer %}")
    with pytest.raises(UserError, match="critique.jinja of the template set .* exceeds a limit: it takes more than"):
        load_set(str(tmp_path))


def test_any_text_comes_back_unchanged():
    texts = ["\U0001f600", "\x00\x1f\r\n\u2028", "x" * 3_000_000, '{"record": 1}']
    for text in texts:
        assert run("{{ messages[0].content }}", [Message("user", text)]) == text


@pytest.mark.process
def test_threads_share_the_process_and_a_fork_starts_its_own():
    run("x")
    child = template._PROCESS._child.pid
    wrong = []

    def work(number):
        for i in range(50):
            text = f"{number}-{i}"
            if run("{{ messages[0].content }}", [Message("user", text)]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and template._PROCESS._child.pid == child
    forked = os.fork()
    if not forked:
        own = run("{{ 1 + 1 }}") == "2" and template._PROCESS._child.pid != child
        template._PROCESS.stop()
        os._exit(0 if own else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert run("{{ 1 + 2 }}") == "3" and template._PROCESS._child.pid == child


@pytest.mark.process
def test_a_killed_process_is_started_again():
    run("x")
    child = template._PROCESS._child
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child.pid, number)
    assert run("{{ 1 + 2 }}") == "3" and template._PROCESS._child is child
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert run("{{ 1 + 2 }}") == "3" and template._PROCESS._child is not child


@pytest.mark.parametrize(("python", "reason"), [("/bin/false", "ended with code 1"), ("/nowhere/python", "No such file")])
def test_a_process_that_does_not_start_is_no_fault_of_the_template(monkeypatch, python, reason):
    template._PROCESS.stop()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="renders templates does not start") as caught:
        patch.setattr(sys, "executable", python)
        run("x")
    assert reason in str(caught.value) and "exceeds" not in str(caught.value)
    assert run("x") == "x"


SCRIPT = """
import os, signal, sys, threading
from jaxalign.data.chat import template
from jaxalign.data.chat.template import render
from jaxalign.records import Message
assert render("{{ messages[0].content }}", "m", [Message("user", "Hi")], {}, False) == "Hi"
print(template._PROCESS._child.pid, flush=True)
if sys.argv[1] == "rendering":  # The parent is killed while its process renders.
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    render("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "m", [], {}, False)
if sys.argv[1] != "exit":
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.process
@pytest.mark.parametrize("end", ["exit", "SIGKILL", "SIGTERM", "SIGINT", "rendering"])
def test_the_process_ends_with_its_parent(tmp_path, end):
    """Also for a script that has no guard of its main module."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py", end], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert end != "exit" or (done.returncode, done.stderr) == (0, "")
    pid = int(done.stdout)
    until = time.monotonic() + 10
    while time.monotonic() < until and is_running(pid):
        time.sleep(0.02)
    assert not is_running(pid)
