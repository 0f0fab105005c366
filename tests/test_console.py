"""A closed pipe ends the output of a program, not the program."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

CODE = """
import pathlib, sys
from jaxalign.commands import output_may_fail
with output_may_fail():
    for number in range(100_000):
        print("line", number, flush=number % 1000 == 0)
        if number % 10_000 == 0:
            print("error", number, file=sys.stderr)
    pathlib.Path(sys.argv[1]).write_text("done")
"""


@pytest.mark.process
@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_a_program_goes_on_when_the_reader_of_its_output_ends(tmp_path, closed):
    command = [sys.executable, "-c", CODE, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               cwd=pathlib.Path(__file__).resolve().parents[1])
    if closed != "stderr":
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
    if closed != "stdout":
        process.stderr.close()
    left = (process.stdout if closed == "stderr" else process.stderr).read() if closed != "both" else ""
    assert process.wait(60) == 0 and (tmp_path / "out").read_text() == "done"
    if closed == "stdout":
        sentences = [line for line in left.splitlines() if not line.startswith("error ")]
        assert sentences == ["standard output cannot be written (Broken pipe); the run goes on without it"]
    if closed == "stderr":
        assert left.splitlines()[-1] == "line 99999"
