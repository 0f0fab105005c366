"""The end of a command: help, a mistake of the user, Ctrl-C, a full disk, a closed pipe, an unexpected error."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys

import pytest

from jaxalign.commands import explain, explain_writing, reserve_memory, run_command
from jaxalign.errors import UserError


def failing(error):
    def body(argv):
        raise error

    return body


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_runs_nothing(flag, capsys):
    assert run_command(["program", flag], "the usage\n", failing(AssertionError())) == 0
    assert capsys.readouterr().out == "the usage\n"


def test_the_body_gets_the_arguments_and_returns_the_exit_code():
    assert run_command(["program", "a", "b"], "", len) == 3
    assert run_command(["program"], "", lambda argv: None) == 0


@pytest.mark.parametrize(("error", "explained", "code", "sentence"), [
    (UserError("it is wrong"), explain, 2, "it is wrong"),
    (KeyboardInterrupt(), explain, 130, "interrupted"),
    (KeyboardInterrupt(), explain_writing, 130, "interrupted; nothing was written"),
    (OSError(errno.ENOSPC, "No space left on device"), explain_writing, 2,
     "the disk is full ([Errno 28] No space left on device); nothing was written: free some space and run the same command "
     "again"),
])
def test_an_error_that_the_user_can_correct_is_one_sentence(error, explained, code, sentence, capsys):
    assert run_command(["program"], "", failing(error), explained) == code
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize(("error", "explained"), [(ValueError("a bug"), explain_writing), (OSError(errno.ENOSPC, ""), explain)])
def test_other_errors_are_raised(error, explained):
    with pytest.raises(type(error)):
        run_command(["program"], "", failing(error), explained)


def test_warnings_of_the_library_have_the_form_of_those_of_stages(capsys):
    log = logging.getLogger("jaxalign")

    def body(argv):
        log.warning("%d rows are left out", 3)
        log.warning("[ppo] all scores are equal")
        log.info("a detail")

    assert run_command(["program"], "", body) == 0
    assert capsys.readouterr().err == "warning: 3 rows are left out\n[ppo] warning: all scores are equal\n"
    assert not log.handlers and log.propagate


@pytest.mark.process
def test_a_closed_pipe_ends_a_command_without_a_message():
    code = "from jaxalign.commands import run_command; exit(run_command(['p'], '', lambda _: print('a\\n' * 10**6)))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


@pytest.mark.parametrize(("given", "expected"), [
    ({}, {"XLA_CLIENT_MEM_FRACTION": "0.95"}),
    ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}),
])
def test_a_command_reserves_the_memory_that_the_plan_assumes(given, expected):
    """JAX refuses an environment with both names."""
    environ = dict(given)
    reserve_memory(environ)
    assert environ == expected
